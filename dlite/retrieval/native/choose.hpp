// From a matched state of a suffix automaton to the tokens to copy: choose.py, step by step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "source.hpp"

namespace dlite {

constexpr std::int32_t kRoot = 0;
constexpr std::int32_t kUnknownEnd = -2;

struct Edges {
  const std::int32_t* tokens;
  const std::int32_t* targets;
  std::int32_t count;
};

// A Graph has text() -> {data, size}, state(s) -> {length, link, first, last, count}, edges(s) and
// child(s, token), -1 where there is none.
template <class Graph>
class Search {
 public:
  Search(const Graph& graph, std::int32_t state, int bound)
      : graph_(graph), state_(state), bound_(bound), budget_(bound),
        live_end_(static_cast<std::int32_t>(graph.text_size()) - 1) {}

  struct Cut {
    std::int32_t count, end;
  };

  Cut cut(std::int32_t state) const {
    const std::int32_t ended = graph_.child(state, kEnd);
    Cut found{0, -1};
    if (ended >= 0) found = {graph_.count(ended), graph_.last(ended) - 1};
    if (graph_.last(state) == live_end_) found = {found.count + 1, live_end_};
    return found;
  }

  std::int32_t oldest() {
    const std::int32_t end = graph_.first(state_);
    if (followed(end)) return end;
    std::int32_t best = INT32_MAX;
    look(state_, [&](std::int32_t child) { best = std::min(best, graph_.first(child)); });
    return best - 1;
  }

  std::int32_t newest(std::int32_t recent_end) {
    const std::int32_t end = recent_end == kUnknownEnd ? graph_.last(state_) : recent_end;
    if (followed(end)) return end;
    std::int32_t best = -1;
    look(state_, [&](std::int32_t child) { best = std::max(best, graph_.last(child)); });
    return best - 1;
  }

  std::int32_t group_count(std::int32_t start) const {
    std::int32_t state = state_;
    int depth = 0;
    for (; depth < kGroupTokens; ++depth) {
      const std::size_t at = static_cast<std::size_t>(start + depth);
      if (start < 0 || at >= graph_.text_size() || graph_.text()[at] == kEnd) break;
      state = graph_.child(state, graph_.text()[at]);
      if (state < 0) return 0;
    }
    return depth == kGroupTokens ? graph_.count(state) : cut(state).count;
  }

  void vote(std::int32_t& count, std::int32_t& start) {
    budget_ = bound_;
    visit(state_, 0);
    count = best_count_;
    start = best_count_ > 0 ? best_end_ + 1 : -1;
  }

  void majority(std::int32_t support, int max_tokens, Found& found) {
    std::int32_t state = state_, left = support;
    int depth = 0;
    while (depth < max_tokens) {
      std::tuple<std::int32_t, std::int32_t, std::int32_t> leader{0, -1, -1};
      look(state, [&](std::int32_t child) {
        leader = std::max(leader, {graph_.count(child), graph_.last(child), child});
      });
      const std::int32_t votes = std::get<0>(leader);
      if (budget_ == 0 || votes == 0 || 2 * static_cast<std::int64_t>(votes) < left) break;
      left = votes;
      state = std::get<2>(leader);
      if (++depth <= kGroupTokens) found.count = votes;
    }
    found.agreed = depth;
    if (depth == 0) return vote(found.count, found.start);
    found.start = graph_.last(state) - depth + 1;
  }

 private:
  void visit(std::int32_t state, int depth) {
    const Edges edges = graph_.edges(state);
    for (std::int32_t i = 0; i < edges.count; ++i) {
      if (budget_ == 0) return;
      --budget_;
      const std::int32_t child = edges.targets[i];
      if (edges.tokens[i] == kEnd || graph_.count(child) < best_count_) continue;
      if (depth + 1 == kGroupTokens) {
        offer({graph_.count(child), graph_.last(child)}, kGroupTokens);
      } else {
        visit(child, depth + 1);
      }
    }
    if (depth > 0 && budget_ > 0) offer(cut(state), depth);
  }

  void offer(Cut group, int depth) {
    const std::int32_t end = group.end - depth;
    if (group.count <= 0) return;
    if (std::pair(group.count, end) <= std::pair(best_count_, best_end_)) return;
    best_count_ = group.count;
    best_end_ = end;
  }

  template <class Visitor>
  void look(std::int32_t state, Visitor&& visitor) {
    const Edges edges = graph_.edges(state);
    for (std::int32_t i = 0; i < edges.count; ++i) {
      if (budget_ == 0) return;
      --budget_;
      if (edges.tokens[i] != kEnd) visitor(edges.targets[i]);
    }
  }

  bool followed(std::int32_t end) const {
    return end < live_end_ && graph_.text()[static_cast<std::size_t>(end + 1)] != kEnd;
  }

  const Graph& graph_;
  const std::int32_t state_;
  const int bound_;
  int budget_;
  const std::int32_t live_end_;
  std::int32_t best_count_ = 0, best_end_ = -1;
};

template <class Graph>
bool goes_on(const Graph& graph, std::int32_t state) {
  const Edges edges = graph.edges(state);
  return edges.count > 1 || (edges.count == 1 && edges.tokens[0] != kEnd);
}

template <class Graph>
Found choose(const Graph& graph, std::int32_t state, std::int32_t length, std::int32_t recent_end,
             Rule rule, int max_tokens, int bound, std::vector<std::int32_t>& out) {
  while (state != kRoot && !goes_on(graph, state)) {
    state = graph.link(state);
    length = graph.length(state);
    recent_end = kUnknownEnd;
  }
  Found found;
  if (state == kRoot) return found;
  Search<Graph> search(graph, state, bound);
  found.length = length;
  found.support = graph.count(state) - search.cut(state).count;
  switch (rule) {
    case Rule::first:
      found.start = search.oldest() + 1;
      found.count = search.group_count(found.start);
      break;
    case Rule::recent:
      found.start = search.newest(recent_end) + 1;
      found.count = search.group_count(found.start);
      break;
    case Rule::vote:
      search.vote(found.count, found.start);
      break;
    case Rule::majority:
      search.majority(found.support, max_tokens, found);
      break;
  }
  found.support = std::max(found.support, found.count);
  const std::int32_t* from = graph.text() + std::max(0, found.start);
  out.insert(out.end(), from,
             from + following(graph.text(), graph.text_size(), found.start, max_tokens));
  return found;
}

// `exact`: the graph's counts are.
template <class Graph>
Outlook outlook(const Graph& graph, std::int32_t state, std::int32_t length, bool exact) {
  while (state != kRoot && !goes_on(graph, state)) {
    state = graph.link(state);
    length = graph.length(state);
  }
  if (state == kRoot) return {0, 0, false};
  if (!exact) return {length, 0, false};
  const Edges edges = graph.edges(state);
  const Search<Graph> search(graph, state, 0);
  const int ends = graph.child(state, kEnd) >= 0;
  return {length, graph.count(state) - search.cut(state).count, edges.count - ends > 1};
}

// A stream followed through a graph that it is no part of: cursor.py.
template <class Graph>
struct Walk {
  std::int32_t state = kRoot, length = 0;
  void prefetch_find(const Graph& graph, int stage) const {
    if (stage == 0) graph.prefetch_child(state, kEnd);
    if (stage == 1) {
      const Edges edges = graph.edges(state);
      for (std::int32_t i = 0; i < std::min(edges.count, 4); ++i)
        graph.prefetch_state(edges.targets[i]);
    }
    if (stage == 2) {
      const std::int32_t next = graph.last(state) + 1;
      if (next > 0) __builtin_prefetch(graph.text() + next);
    }
  }

  void repair(const Graph& graph) {
    while (state != kRoot && graph.length(graph.link(state)) >= length) state = graph.link(state);
  }

  void extend(const Graph& graph, const std::int32_t* tokens, std::size_t count) {
    repair(graph);
    for (std::size_t i = 0; i < count; ++i) {
      std::int32_t target = graph.child(state, tokens[i]);
      while (target < 0 && state != kRoot) {
        state = graph.link(state);
        length = graph.length(state);
        target = graph.child(state, tokens[i]);
      }
      length = target >= 0 ? length + 1 : 0;
      state = target >= 0 ? target : kRoot;
    }
  }
};

}  // namespace dlite
