// Hash chains: chain.py, step by step.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "source.hpp"

namespace dlite {

class HashChain final : public Source {
 public:
  static constexpr int kMaxCandidates = 1024;
  static constexpr std::size_t kMaxTokens = std::size_t{1} << 30;

  HashChain(int min_match, int max_match, int candidates)
      : width_(min_match), max_match_(max_match), candidates_(candidates) {
    check("min_match", min_match, 1, 8);
    check("max_match", max_match, min_match, 1024);
    check("candidates", candidates, 1, kMaxCandidates);
  }

  std::mutex& guard() override { return guard_; }
  void check_open() const override {
    if (closed_) closed();
  }

  void extend(const std::int32_t* tokens, std::size_t count) override {
    if (text_.size() + count > kMaxTokens)
      throw std::invalid_argument("a corpus holds at most " + std::to_string(kMaxTokens) +
                                  " tokens; split it");
    const std::size_t begin = text_.append(count);
    earlier_.append(count);
    std::copy(tokens, tokens + count, text_.data() + begin);
    make_room(num_grams_ + count / 2 + 1);
    const std::size_t stop = text_.size();
    std::size_t at = begin;
    const std::size_t first = segment_start_ + static_cast<std::size_t>(width_) - 1;
    for (; at < std::min(first, stop); ++at) earlier_[at] = 0;
    std::array<std::uint64_t, kAhead> mixes;
    const auto look_ahead = [&](std::size_t position) {
      const std::uint64_t mix = mixed(text_.data() + position);
      mixes[position % kAhead] = mix;
      __builtin_prefetch(&newest_[home(mix)], 1);
    };
    for (std::size_t ahead = at; ahead < std::min(at + kAhead, stop); ++ahead) look_ahead(ahead);
    for (; at < stop; ++at) {
      earlier_[at] = exchange(at, mixes[at % kAhead]);
      if (at + kAhead < stop) look_ahead(at + kAhead);
    }
  }

  void prefetch(int stage, const std::int32_t* tokens, std::size_t count) override {
    const std::size_t size = text_.size();
    if (stage == 0) {
      __builtin_prefetch(text_.data() + size);
      __builtin_prefetch(earlier_.data() + size, 1);
      return;
    }
    if (count != 1 || size < segment_start_ + static_cast<std::size_t>(width_)) return;
    if (stage == 1) {
      std::array<std::int32_t, 8> gram;
      const auto kept = static_cast<std::size_t>(width_) - 1;
      std::copy(text_.data() + size - kept, text_.data() + size, gram.begin());
      gram[kept] = tokens[0];
      warm_ = home(mixed(gram.data() + kept));
      __builtin_prefetch(&newest_[warm_], 1);
    } else if (stage == 2 && newest_[warm_]) {
      __builtin_prefetch(&text_[static_cast<std::size_t>(newest_[warm_]) - 1]);
      __builtin_prefetch(&earlier_[static_cast<std::size_t>(newest_[warm_]) - 1]);
    }
  }

  void prefetch_find(int stage, Rule) override {
    if (text_.size() == segment_start_) return;
    if (stage == 0) {
      walk_ = earlier_[text_.size() - 1];
    } else if (walk_) {
      walk_ = earlier_[static_cast<std::size_t>(walk_) - 1];
    }
    if (!walk_) return;
    __builtin_prefetch(&earlier_[static_cast<std::size_t>(walk_) - 1]);
    __builtin_prefetch(&text_[static_cast<std::size_t>(walk_) - 1]);
  }

  void end_segment() {
    text_.push_back(kEnd);
    earlier_.push_back(0);
    segment_start_ = text_.size();
  }

  Found find(Rule rule, int max_tokens, std::vector<std::int32_t>& out) override {
    if (text_.size() == segment_start_) return {};
    const std::size_t limit = text_.size() - segment_start_;
    return find(text_.data() + text_.size() - 1, limit, earlier_[text_.size() - 1], rule,
                max_tokens, out);
  }

  // For a stream that isn't in the text, given by its last token and its length.
  Found find_for(const std::int32_t* last, std::size_t size, Rule rule, int max_tokens,
                 std::vector<std::int32_t>& out) {
    if (size < static_cast<std::size_t>(width_) || newest_.size() == 0) return {};
    for (std::size_t at = home(mixed(last)); newest_[at]; at = (at + 1) & (newest_.size() - 1))
      if (same(last, text_.data() + newest_[at] - 1))
        return find(last, size, newest_[at], rule, max_tokens, out);
    return {};
  }

  int max_match() const { return max_match_; }
  std::size_t text_size() const { return text_.size(); }

  void wipe_all() {
    closed_ = true;
    text_.clear();
    earlier_.clear();
    newest_.clear();
  }

  void close() {
    wipe_all();
    text_.release();
    earlier_.release();
    newest_.release();
  }

  std::size_t used_bytes() const {
    return text_.used_bytes() + earlier_.used_bytes() + newest_.used_bytes();
  }
  std::size_t allocated_bytes() const {
    return text_.allocated_bytes() + earlier_.allocated_bytes() + newest_.allocated_bytes();
  }
  std::vector<std::pair<std::uintptr_t, std::size_t>> memory_ranges() const {
    const auto range = [](const auto& region) {
      return std::pair(reinterpret_cast<std::uintptr_t>(region.data()), region.allocated_bytes());
    };
    return {range(text_), range(earlier_), range(newest_)};
  }

 private:
  static constexpr std::size_t kAhead = 8;

  static void check(const char* name, int value, int low, int high) {
    if (value >= low && value <= high) return;
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                "; give an integer in " + std::to_string(low) + " .. " +
                                std::to_string(high));
  }

  // Random keys per process: no text can be made to collide.
  struct Keys {
    Keys() {
      std::random_device draw;
      for (auto& factor : factors) factor = (std::uint64_t{draw()} << 32 | draw()) | 1;
    }
    std::array<std::uint64_t, 8> factors;
  };
  static const Keys& keys() {
    static const Keys drawn;
    return drawn;
  }

  bool same(const std::int32_t* a, const std::int32_t* b) const {
    if (width_ == 3) return a[0] == b[0] && a[-1] == b[-1] && a[-2] == b[-2];
    return std::equal(a - width_ + 1, a + 1, b - width_ + 1);
  }

  std::uint64_t mixed(const std::int32_t* last) const {
    const auto term = [&](int i) {
      return static_cast<std::uint32_t>(last[-i]) * keys_.factors[static_cast<std::size_t>(i)];
    };
    if (width_ == 3) return term(0) + term(1) + term(2);
    std::uint64_t sum = 0;
    for (int i = 0; i < width_; ++i) sum += term(i);
    return sum;
  }

  std::size_t home(std::uint64_t mix) const { return static_cast<std::size_t>(mix >> shift_); }

  // Enters position `at` as the newest of its gram; returns the one before it, plus one.
  std::int32_t exchange(std::size_t at, std::uint64_t mix) {
    const std::int32_t* last = text_.data() + at;
    std::size_t place = home(mix);
    while (newest_[place]) {
      if (same(last, text_.data() + newest_[place] - 1))
        return std::exchange(newest_[place], static_cast<std::int32_t>(at) + 1);
      place = (place + 1) & (newest_.size() - 1);
    }
    newest_[place] = static_cast<std::int32_t>(at) + 1;
    ++num_grams_;
    if (num_grams_ * 4 > newest_.size() * 3) make_room(num_grams_ + 1);
    return 0;
  }

  // For `grams` grams at three quarters full.
  void make_room(std::size_t grams) {
    if (grams * 4 <= newest_.size() * 3) return;
    Region<std::int32_t> old;
    old.swap(newest_);
    const std::size_t size = std::bit_ceil(std::max<std::size_t>(16, grams * 4 / 3 + 1));
    newest_.append(size);
    shift_ = 64 - std::countr_zero(size);
    for (std::size_t i = 0; i < old.size(); ++i) {
      if (!old[i]) continue;
      std::size_t place = home(mixed(text_.data() + old[i] - 1));
      while (newest_[place]) place = (place + 1) & (size - 1);
      newest_[place] = old[i];
    }
  }

  // `newest` is a position plus one, or 0.
  Found find(const std::int32_t* last, std::size_t limit, std::int32_t newest, Rule rule,
             int max_tokens, std::vector<std::int32_t>& out) {
    limit = std::min(limit, static_cast<std::size_t>(max_match_));
    std::array<std::int32_t, kMaxCandidates> ends;
    std::int32_t longest = 0;
    int kept = 0;
    for (int left = candidates_; newest && left; --left) {
      const std::int32_t end = newest - 1;
      newest = earlier_[static_cast<std::size_t>(end)];
      if (following(text_.data(), text_.size(), end + 1, 1) == 0) continue;
      const std::int32_t length = common(last, limit, end);
      if (length > longest) {
        longest = length;
        kept = 0;
      }
      if (length == longest) ends[static_cast<std::size_t>(kept++)] = end;
    }
    Found found;
    if (kept == 0) return found;
    found.length = longest;
    found.support = kept;
    select(ends.data(), kept, rule, max_tokens, found);
    const std::int32_t* from = text_.data() + found.start;
    out.insert(out.end(), from, from + following(text_.data(), text_.size(), found.start, max_tokens));
    return found;
  }

  std::int32_t common(const std::int32_t* last, std::size_t limit, std::int32_t end) const {
    limit = std::min(limit, static_cast<std::size_t>(end) + 1);
    const std::int32_t* text = text_.data() + end;
    std::size_t length = 0;
    while (length < limit && *(text - length) == *(last - length)) ++length;
    return static_cast<std::int32_t>(length);
  }

  bool same_group(std::int32_t a, std::int32_t b) const {
    const std::size_t size = following(text_.data(), text_.size(), a + 1, kGroupTokens);
    if (following(text_.data(), text_.size(), b + 1, kGroupTokens) != size) return false;
    return std::equal(text_.data() + a + 1, text_.data() + a + 1 + size, text_.data() + b + 1);
  }

  std::int32_t group_size(const std::int32_t* ends, int kept, std::int32_t end) const {
    return static_cast<std::int32_t>(
        std::count_if(ends, ends + kept, [&](std::int32_t e) { return same_group(e, end); }));
  }

  void select(std::int32_t* ends, int kept, Rule rule, int max_tokens, Found& found) const {
    switch (rule) {
      case Rule::first:
        found.start = ends[kept - 1] + 1;
        found.count = group_size(ends, kept, ends[kept - 1]);
        return;
      case Rule::recent:
        found.start = ends[0] + 1;
        found.count = group_size(ends, kept, ends[0]);
        return;
      case Rule::majority:
        majority(ends, kept, max_tokens, found);
        if (found.agreed > 0) return;
        [[fallthrough]];
      case Rule::vote:
        vote(ends, kept, found);
    }
  }

  void vote(const std::int32_t* ends, int kept, Found& found) const {
    std::array<bool, kMaxCandidates> counted{};
    found.count = 0;
    for (int i = 0; i < kept && kept - i > found.count; ++i) {
      if (counted[static_cast<std::size_t>(i)]) continue;
      std::int32_t size = 0;
      for (int j = i; j < kept; ++j) {
        if (!same_group(ends[i], ends[j])) continue;
        counted[static_cast<std::size_t>(j)] = true;
        ++size;
      }
      if (size > found.count) {
        found.count = size;
        found.start = ends[i] + 1;
      }
    }
  }

  // Drops from `ends`, which stay in order, those that leave the majority.
  void majority(std::int32_t* ends, int kept, int max_tokens, Found& found) const {
    std::array<std::int32_t, kMaxCandidates> all;
    std::copy(ends, ends + kept, all.begin());
    int left = kept;
    while (found.agreed < max_tokens) {
      std::int32_t leader = kEnd;
      int votes = 0;
      for (int i = 0; i < left && left - i > votes; ++i) {
        const std::int32_t token = token_at(all[static_cast<std::size_t>(i)] + 1 + found.agreed);
        if (token == kEnd) continue;
        int same_token = 0;
        for (int j = 0; j < left; ++j)
          same_token += token_at(all[static_cast<std::size_t>(j)] + 1 + found.agreed) == token;
        if (same_token > votes) {
          votes = same_token;
          leader = token;
        }
      }
      if (votes == 0 || 2 * votes < left) break;
      int stay = 0;
      for (int j = 0; j < left; ++j) {
        const std::int32_t end = all[static_cast<std::size_t>(j)];
        if (token_at(end + 1 + found.agreed) == leader) all[static_cast<std::size_t>(stay++)] = end;
      }
      left = stay;
      if (++found.agreed <= kGroupTokens) found.count = left;
    }
    if (found.agreed > 0) found.start = all[0] + 1;
  }

  std::int32_t token_at(std::int32_t at) const {
    return static_cast<std::size_t>(at) < text_.size() ? text_[static_cast<std::size_t>(at)] : kEnd;
  }

  Region<std::int32_t> text_;
  Region<std::int32_t> earlier_;  // per position: the one before it with the same gram, plus one
  Region<std::int32_t> newest_;   // hash table of positions, plus one
  std::size_t num_grams_ = 0, segment_start_ = 0;
  const Keys& keys_ = keys();
  int width_, max_match_, candidates_, shift_ = 64;
  std::size_t warm_ = 0;    // the place that `prefetch` expects to be used
  std::int32_t walk_ = 0;  // the candidate that `prefetch_find` has come to
  bool closed_ = false;
  std::mutex guard_;
};

}  // namespace dlite
