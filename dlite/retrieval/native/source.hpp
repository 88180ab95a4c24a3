// What the engines have in common; see base.py for the words.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "region.hpp"

namespace dlite {

constexpr std::int32_t kEnd = -1;
constexpr int kGroupTokens = 3;

enum class Rule : int { first = 0, recent = 1, vote = 2, majority = 3 };

struct Found {
  std::int32_t length = 0, support = 0, count = 0, start = -1, agreed = 0;
};

// Tokens on their way in or out. They are wiped after each call: they may be somebody's secrets.
struct Scratch {
  ~Scratch() { wipe(tokens.data(), tokens.size() * sizeof(std::int32_t)); }
  std::vector<std::int32_t> tokens;
};

// The stretch text[start ..], at most `limit` tokens, up to the end of its segment.
inline std::size_t following(const std::int32_t* text, std::size_t size, std::int32_t start,
                             int limit) {
  if (start < 0 || limit <= 0) return 0;
  const auto begin = static_cast<std::size_t>(start);
  const std::size_t stop = std::min(size, begin + static_cast<std::size_t>(limit));
  std::size_t end = begin;
  while (end < stop && text[end] != kEnd) ++end;
  return end - begin;
}

// What is known of a find before it has looked for tokens.
struct Outlook {
  std::int32_t length = -1;   // of the match; -1: not known
  std::int32_t support = 0;   // 0: not known
  bool splits = false;        // its occurrences don't all go on alike
};

class Source {
 public:
  virtual ~Source() = default;
  // Held while the source is used. Sources of one corpus share it.
  virtual std::mutex& guard() = 0;
  virtual void check_open() const = 0;
  // Asks the caches for what `extend` of these tokens will touch, and after it `find`, one step of
  // a pointer chase per stage: in a batch the waits of all the sources then overlap.
  static constexpr int kStages = 6;
  virtual void prefetch(int /*stage*/, const std::int32_t* /*tokens*/, std::size_t /*count*/) {}
  static constexpr int kFindStages = 5;
  virtual void prefetch_find(int /*stage*/, Rule /*rule*/) {}
  virtual void extend(const std::int32_t* tokens, std::size_t count) = 0;
  virtual Outlook outlook() { return {}; }
  // Appends the tokens to `out`.
  virtual Found find(Rule rule, int max_tokens, std::vector<std::int32_t>& out) = 0;
};

inline void closed() { throw std::invalid_argument("this index is closed; open a new one"); }

}  // namespace dlite
