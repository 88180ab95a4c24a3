// A static corpus: arrays that frozen.py has checked, searched where they lie. Freezing, too.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include "automaton.hpp"

namespace dlite {

// In the order of the fields of FrozenArrays.
constexpr std::array kFrozenNames = {"text",  "length",     "link",       "first",      "last",
                                     "count", "edge_start", "edge_token", "edge_target"};

struct Array {
  const std::int32_t* data = nullptr;
  std::size_t size = 0;
};

class Frozen {
 public:
  Frozen(const std::array<Array, kFrozenNames.size()>& arrays, int search_bound)
      : arrays_(arrays), search_bound_(search_bound) {}

  const std::int32_t* text() const { return arrays_[0].data; }
  std::size_t text_size() const { return arrays_[0].size; }
  std::int32_t length(std::int32_t s) const { return arrays_[1].data[s]; }
  std::int32_t link(std::int32_t s) const { return arrays_[2].data[s]; }
  std::int32_t first(std::int32_t s) const { return arrays_[3].data[s]; }
  std::int32_t last(std::int32_t s) const { return arrays_[4].data[s]; }
  std::int32_t count(std::int32_t s) const { return arrays_[5].data[s]; }

  Edges edges(std::int32_t s) const {
    const std::int32_t low = arrays_[6].data[s];
    return {arrays_[7].data + low, arrays_[8].data + low, arrays_[6].data[s + 1] - low};
  }

  std::int32_t child(std::int32_t s, std::int32_t token) const {
    const Edges found = edges(s);
    const std::int32_t* stop = found.tokens + found.count;
    const std::int32_t* edge = std::lower_bound(found.tokens, stop, token);
    return edge != stop && *edge == token ? found.targets[edge - found.tokens] : -1;
  }

  void prefetch_state(std::int32_t s) const {
    for (const std::size_t column : {1, 2, 4, 5, 6}) __builtin_prefetch(arrays_[column].data + s);
  }
  void prefetch_child(std::int32_t s, std::int32_t) const {
    const std::int32_t low = arrays_[6].data[s], middle = (low + arrays_[6].data[s + 1]) / 2;
    __builtin_prefetch(arrays_[7].data + low);
    __builtin_prefetch(arrays_[7].data + middle);
    __builtin_prefetch(arrays_[8].data + low);
  }

  int search_bound() const { return search_bound_; }

 private:
  std::array<Array, kFrozenNames.size()> arrays_;
  int search_bound_;
};

using FrozenColumns = std::array<std::vector<std::int32_t>, kFrozenNames.size()>;

// How often, and where last, each state ends: by one pass from long strings to short ones.
inline void count_exactly(const Automaton& automaton, std::vector<std::int32_t>& count,
                          std::vector<std::int32_t>& last) {
  const std::size_t states = automaton.num_states();
  count.assign(states, 0);
  last.assign(states, -1);
  std::int32_t state = kRoot;
  for (std::size_t at = 0; at < automaton.text_size(); ++at) {
    state = automaton.child(state, automaton.text()[at]);
    count[static_cast<std::size_t>(state)] = 1;
    last[static_cast<std::size_t>(state)] = static_cast<std::int32_t>(at);
  }
  std::vector<std::int32_t> order(states - 1);
  std::iota(order.begin(), order.end(), 1);
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return automaton.length(a) > automaton.length(b);
  });
  for (const std::int32_t s : order) {
    const auto parent = static_cast<std::size_t>(automaton.link(s));
    count[parent] += count[static_cast<std::size_t>(s)];
    last[parent] = std::max(last[parent], last[static_cast<std::size_t>(s)]);
  }
}

// The states that a query, or the end of a segment behind it, leads to: their new numbers, else -1.
inline std::vector<std::int32_t> renumber(const Automaton& automaton) {
  std::vector<std::int32_t> number(automaton.num_states(), -1);
  std::vector<std::int32_t> waiting{kRoot};
  number[kRoot] = 0;
  while (!waiting.empty()) {
    const Edges edges = automaton.edges(waiting.back());
    waiting.pop_back();
    for (std::int32_t i = 0; i < edges.count; ++i) {
      auto& seen = number[static_cast<std::size_t>(edges.targets[i])];
      if (seen >= 0) continue;
      seen = 0;
      if (edges.tokens[i] != kEnd) waiting.push_back(edges.targets[i]);
    }
  }
  std::int32_t next = 0;
  for (auto& seen : number)
    if (seen >= 0) seen = next++;
  return number;
}

inline FrozenColumns freeze(const Automaton& automaton) {
  if (automaton.text_size() > 0 && automaton.text()[automaton.text_size() - 1] != kEnd)
    throw std::invalid_argument(
        "the last segment is open; call end_segment() before freeze()");
  std::vector<std::int32_t> count, last;
  count_exactly(automaton, count, last);
  const std::vector<std::int32_t> number = renumber(automaton);
  FrozenColumns columns;
  auto& [text, length, link, first, ends, counts, starts, tokens, targets] = columns;
  text.assign(automaton.text(), automaton.text() + automaton.text_size());
  starts.push_back(0);
  std::vector<std::pair<std::int32_t, std::int32_t>> sorted;
  for (std::size_t i = 0; i < number.size(); ++i) {
    if (number[i] < 0) continue;
    const auto state = static_cast<std::int32_t>(i);
    const std::int32_t parent = automaton.link(state);
    length.push_back(automaton.length(state));
    link.push_back(parent < 0 ? -1 : std::max(0, number[static_cast<std::size_t>(parent)]));
    first.push_back(automaton.first(state));
    ends.push_back(last[i]);
    counts.push_back(count[i]);
    const bool ended =
        state != kRoot && text[static_cast<std::size_t>(automaton.first(state))] == kEnd;
    if (!ended) {
      const Edges edges = automaton.edges(state);
      sorted.clear();
      for (std::int32_t e = 0; e < edges.count; ++e)
        sorted.emplace_back(edges.tokens[e], number[static_cast<std::size_t>(edges.targets[e])]);
      std::sort(sorted.begin(), sorted.end());
      for (const auto& [token, target] : sorted) {
        tokens.push_back(token);
        targets.push_back(target);
      }
    }
    starts.push_back(static_cast<std::int32_t>(tokens.size()));
  }
  return columns;
}

}  // namespace dlite
