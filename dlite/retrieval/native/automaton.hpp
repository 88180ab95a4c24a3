// Suffix automaton: automaton.py, step by step.
#pragma once

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "choose.hpp"
#include "edge_pool.hpp"

namespace dlite {

class Automaton final : public Source {
 public:
  static constexpr std::size_t kMaxTokens = std::size_t{1} << 25;  // places in the pool fit 31 bits

  Automaton(int chain_cap, int search_bound) : search_bound_(search_bound) {
    if (chain_cap < 0 || chain_cap == 1)
      throw std::invalid_argument("chain_cap is " + std::to_string(chain_cap) +
                                  "; give 0 (no cap) or an integer >= 2");
    if (search_bound < 2)
      throw std::invalid_argument("search_bound is " + std::to_string(search_bound) +
                                  "; give an integer >= 2");
    chain_cap_ = chain_cap ? chain_cap : INT32_MAX;
    states_.push_back({0, -1, -1, -1, 0, 0, 0, 0});
  }

  std::mutex& guard() override { return guard_; }
  void check_open() const override {
    if (closed_) closed();
  }

  void extend(const std::int32_t* tokens, std::size_t count) override {
    if (text_.size() + count > kMaxTokens)
      throw std::invalid_argument("a corpus holds at most " + std::to_string(kMaxTokens) +
                                  " tokens; split it");
    if (count == 0) return;
    std::int32_t earlier = -1;
    for (std::size_t i = 0; i < count; ++i) earlier = add(tokens[i]);
    match_ = states_[index(tail_)].link;
    match_length_ = length(match_);
    earlier_ = earlier;
    stay_in_segment();
  }

  void end_segment() {
    add(kEnd);
    segment_start_ = text_.size();
    match_ = kRoot;
    match_length_ = 0;
  }

  Found find(Rule rule, int max_tokens, std::vector<std::int32_t>& out) override {
    return choose(*this, match_, match_length_, earlier_, rule, max_tokens, search_bound_, out);
  }

  // Walks as `add` will: up the links to the state that has an edge for the token, then on from its
  // target. A block of edges is asked for in one stage and looked at in the next.
  void prefetch(int stage, const std::int32_t* tokens, std::size_t count) override {
    if (count == 0) return;
    if (stage == 0) {
      warm_ = {tail_, -1, false};
      __builtin_prefetch(text_.data() + text_.size(), 1);
      __builtin_prefetch(&states_[states_.size()], 1);
    } else if (warm_.edge_found) {
      warm_.state = warm_.state > kRoot ? link(warm_.state) : -1;
    } else {
      prefetch_edge(tokens[0]);
    }
    if (warm_.state >= kRoot) __builtin_prefetch(&states_[index(warm_.state)], 1);
  }

  // The way that the match's most recent continuation takes; for a vote the nearest branches.
  void prefetch_find(int stage, Rule rule) override {
    if (stage == 0) {
      way_ = {match_, 0, false};
      if (earlier_ >= 0) __builtin_prefetch(&text_[static_cast<std::size_t>(earlier_) + 1]);
      prefetch_edges(match_);
    } else if (rule == Rule::recent) {
      prefetch_way();
    } else {
      const Edges below = edges(match_);
      for (std::int32_t i = 0; i < std::min(below.count, 4); ++i) {
        const std::int32_t child = below.targets[i];
        if (stage == 1) __builtin_prefetch(&states_[index(child)]);
        if (stage == 2) prefetch_edges(child);
        if (stage == 3) __builtin_prefetch(&states_[index(edges(child).targets[0])]);
      }
    }
  }

  void wipe_all() {
    closed_ = true;
    text_.clear();
    states_.clear();
    edges_.memory().clear();
  }

  void close() {
    wipe_all();
    text_.release();
    states_.release();
    edges_.memory().release();
  }

  // What choose.hpp asks of a graph.
  const std::int32_t* text() const { return text_.data(); }
  std::size_t text_size() const { return text_.size(); }
  std::int32_t length(std::int32_t s) const { return states_[index(s)].length; }
  std::int32_t link(std::int32_t s) const { return states_[index(s)].link; }
  std::int32_t first(std::int32_t s) const { return states_[index(s)].first; }
  std::int32_t last(std::int32_t s) const { return states_[index(s)].last; }
  std::int32_t count(std::int32_t s) const { return states_[index(s)].count; }

  std::int32_t child(std::int32_t s, std::int32_t token) const {
    auto& self = const_cast<Automaton&>(*this);
    const std::int32_t* target = self.edges_.target(self.states_[index(s)], token);
    return target ? *target : -1;
  }

  Edges edges(std::int32_t s) const {
    const State& state = states_[index(s)];
    if (state.num_edges <= 1)
      return {&state.token, reinterpret_cast<const std::int32_t*>(&state.place), state.num_edges};
    const std::int32_t* block = edges_.block(state);
    return {block, block + EdgePool::capacity(state.num_edges), state.num_edges};
  }

  void prefetch_state(std::int32_t s) const { __builtin_prefetch(&states_[index(s)]); }
  void prefetch_child(std::int32_t s, std::int32_t token) const {
    const State& state = states_[index(s)];
    if (state.num_edges > 1) edges_.prefetch(state, token);
  }

  int search_bound() const { return search_bound_; }
  std::size_t num_states() const { return states_.size(); }
  std::size_t used_bytes() const {
    return text_.used_bytes() + states_.used_bytes() + edges_.memory().used_bytes();
  }
  std::size_t allocated_bytes() const {
    return text_.allocated_bytes() + states_.allocated_bytes() + edges_.memory().allocated_bytes();
  }
  std::vector<std::pair<std::uintptr_t, std::size_t>> memory_ranges() const {
    const auto range = [](const auto& region) {
      return std::pair(reinterpret_cast<std::uintptr_t>(region.data()), region.allocated_bytes());
    };
    return {range(text_), range(states_), range(edges_.memory())};
  }

 private:
  static std::size_t index(std::int32_t state) { return static_cast<std::size_t>(state); }

  void prefetch_edge(std::int32_t token) {
    const std::int32_t* target = nullptr;
    if (warm_.looked_into >= kRoot) {
      target = edges_.target(states_[index(warm_.looked_into)], token);
      warm_.looked_into = -1;
    }
    if (!target && warm_.state >= kRoot) {
      State& state = states_[index(warm_.state)];
      if (state.num_edges > 1) {
        edges_.prefetch(state, token);
        warm_.looked_into = warm_.state;
      } else {
        target = edges_.target(state, token);
      }
      if (!target) warm_.state = state.link;
    }
    if (target) warm_ = {*target, -1, true};
  }

  void prefetch_way() {
    const std::size_t at = static_cast<std::size_t>(earlier_ + 1 + way_.depth);
    if (earlier_ < 0 || way_.depth == kGroupTokens || at >= text_.size()) return;
    State& state = states_[index(way_.state)];
    if (!way_.asked && state.num_edges > 1) {
      edges_.prefetch(state, text_[at]);
      way_.asked = true;
    } else if (const std::int32_t* target = edges_.target(state, text_[at])) {
      way_ = {*target, way_.depth + 1, false};
      __builtin_prefetch(&states_[index(*target)]);
    } else {
      way_.depth = kGroupTokens;
    }
  }

  void prefetch_edges(std::int32_t s) const {
    const State& state = states_[index(s)];
    if (state.num_edges > 1) __builtin_prefetch(edges_.block(state));
  }

  // Returns the last end, before this one, of the longest match.
  std::int32_t add(std::int32_t token) {
    const auto position = static_cast<std::int32_t>(text_.size());
    text_.push_back(token);
    const auto state = static_cast<std::int32_t>(states_.size());
    states_.push_back({length(tail_) + 1, kRoot, position, -1, 0, 0, 0, 0});
    std::int32_t parent = tail_;
    while (parent >= 0) {
      State& from = states_[index(parent)];
      if (const std::int32_t* target = edges_.target(from, token)) {
        std::int32_t child = *target;
        if (length(child) != from.length + 1) child = split(parent, token, child);
        states_[index(state)].link = child;
        break;
      }
      edges_.insert(from, token, state);
      parent = from.link;
    }
    tail_ = state;
    const std::int32_t earlier = last(states_[index(state)].link);
    std::int32_t suffix = state;
    for (std::int32_t left = chain_cap_; suffix > 0 && left > 0; --left) {
      State& passed = states_[index(suffix)];
      ++passed.count;
      passed.last = position;
      suffix = passed.link;
    }
    return earlier;
  }

  std::int32_t split(std::int32_t parent, std::int32_t token, std::int32_t child) {
    const auto clone = static_cast<std::int32_t>(states_.size());
    State copied = states_[index(child)];
    copied.length = length(parent) + 1;
    edges_.copy(copied);
    states_.push_back(copied);
    states_[index(child)].link = clone;
    while (parent >= 0) {
      std::int32_t* target = edges_.target(states_[index(parent)], token);
      if (!target || *target != child) break;
      *target = clone;
      parent = link(parent);
    }
    return clone;
  }

  // A match that reaches over the segment's start is shortened to it.
  void stay_in_segment() {
    const auto limit = static_cast<std::int32_t>(text_.size() - segment_start_);
    if (match_length_ <= limit) return;
    while (match_ != kRoot && length(link(match_)) >= limit) {
      match_ = link(match_);
      earlier_ = kUnknownEnd;
    }
    match_length_ = limit;
  }

  Region<std::int32_t> text_;
  Region<State> states_;
  EdgePool edges_;
  std::int32_t tail_ = kRoot, match_ = kRoot, match_length_ = 0, earlier_ = -1, chain_cap_;
  struct Warm {
    std::int32_t state, looked_into;
    bool edge_found;
  };
  Warm warm_{};  // where `prefetch` has come to
  struct Way {
    std::int32_t state;
    int depth;
    bool asked;
  };
  Way way_{};  // where `prefetch_find` has come to
  std::size_t segment_start_ = 0;
  int search_bound_;
  bool closed_ = false;
  std::mutex guard_;
};

}  // namespace dlite
