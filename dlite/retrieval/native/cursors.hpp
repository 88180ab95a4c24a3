// Streams that are no part of the corpus they look into.
#pragma once

#include <nanobind/nanobind.h>

#include "automaton.hpp"
#include "chain.hpp"
#include "frozen.hpp"

namespace dlite {

class AutomatonCursor final : public Source {
 public:
  AutomatonCursor(nanobind::object owner, Automaton& automaton)
      : owner_(std::move(owner)), automaton_(automaton) {}

  std::mutex& guard() override { return automaton_.guard(); }
  void check_open() const override { automaton_.check_open(); }
  void reset() { walk_ = {}; }
  void prefetch_find(int stage, Rule) override { walk_.prefetch_find(automaton_, stage); }
  void extend(const std::int32_t* tokens, std::size_t count) override {
    walk_.extend(automaton_, tokens, count);
  }
  Outlook outlook() override {
    walk_.repair(automaton_);
    return dlite::outlook(automaton_, walk_.state, walk_.length, false);
  }
  Found find(Rule rule, int max_tokens, std::vector<std::int32_t>& out) override {
    walk_.repair(automaton_);
    return choose(automaton_, walk_.state, walk_.length, kUnknownEnd, rule, max_tokens,
                  automaton_.search_bound(), out);
  }

 private:
  nanobind::object owner_;  // keeps the automaton alive
  Automaton& automaton_;
  Walk<Automaton> walk_;
};

class FrozenCursor final : public Source {
 public:
  FrozenCursor(nanobind::object owner, const Frozen& frozen)
      : owner_(std::move(owner)), frozen_(frozen) {}

  std::mutex& guard() override { return guard_; }
  void check_open() const override {}
  void reset() { walk_ = {}; }
  void prefetch_find(int stage, Rule) override { walk_.prefetch_find(frozen_, stage); }
  void extend(const std::int32_t* tokens, std::size_t count) override {
    walk_.extend(frozen_, tokens, count);
  }
  Outlook outlook() override {
    return dlite::outlook(frozen_, walk_.state, walk_.length, true);
  }
  Found find(Rule rule, int max_tokens, std::vector<std::int32_t>& out) override {
    return choose(frozen_, walk_.state, walk_.length, kUnknownEnd, rule, max_tokens,
                  frozen_.search_bound(), out);
  }

 private:
  nanobind::object owner_;
  const Frozen& frozen_;
  Walk<Frozen> walk_;
  std::mutex guard_;
};

class ChainCursor final : public Source {
 public:
  ChainCursor(nanobind::object owner, HashChain& chain)
      : owner_(std::move(owner)),
        chain_(chain),
        size_(static_cast<std::size_t>(chain.max_match())) {
    stream_.reserve(2 * size_);
  }

  std::mutex& guard() override { return chain_.guard(); }
  void check_open() const override { chain_.check_open(); }
  void reset() { stream_.clear(); }

  void extend(const std::int32_t* tokens, std::size_t count) override {
    if (count >= size_) {
      tokens += count - size_;
      count = size_;
      stream_.clear();
    } else if (stream_.size() + count > 2 * size_) {
      const std::size_t keep = size_ - count;
      std::vector<std::int32_t> tail(stream_.data() + stream_.size() - keep,
                                     stream_.data() + stream_.size());
      stream_.clear();
      std::copy(tail.begin(), tail.end(), stream_.data() + stream_.append(keep));
      wipe(tail.data(), tail.size() * sizeof(std::int32_t));
    }
    std::copy(tokens, tokens + count, stream_.data() + stream_.append(count));
  }

  Found find(Rule rule, int max_tokens, std::vector<std::int32_t>& out) override {
    if (stream_.size() == 0) return {};
    return chain_.find_for(stream_.data() + stream_.size() - 1, stream_.size(), rule, max_tokens,
                           out);
  }

 private:
  nanobind::object owner_;
  HashChain& chain_;
  std::size_t size_;
  Region<std::int32_t> stream_;  // its last `size_` tokens at least
};

}  // namespace dlite
