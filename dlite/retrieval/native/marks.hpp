// The twin of dlite/drafters/marks.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dlite {

class Marks {
 public:
  void mark(std::int64_t start, std::int64_t value) {
    if (!values_.empty() && values_.back() == value) return;
    starts_.push_back(start);
    values_.push_back(value);
  }

  std::int64_t at(std::int64_t position) const {
    const auto after = std::upper_bound(starts_.begin(), starts_.end(), position);
    return values_[static_cast<std::size_t>(std::max<std::ptrdiff_t>(after - starts_.begin(), 1)) -
                   1];
  }

  // Forgets the stretches that start at `size` or behind.
  void cut(std::int64_t size) {
    while (!starts_.empty() && starts_.back() >= size) {
      starts_.pop_back();
      values_.pop_back();
    }
  }

  // The first `count` positions are gone.
  void drop(std::int64_t count) {
    auto first = std::upper_bound(starts_.begin(), starts_.end(), count) - starts_.begin();
    first = std::max<std::ptrdiff_t>(first - 1, 0);
    starts_.erase(starts_.begin(), starts_.begin() + first);
    values_.erase(values_.begin(), values_.begin() + first);
    for (std::int64_t& start : starts_) start = std::max<std::int64_t>(0, start - count);
  }

 private:
  std::vector<std::int64_t> starts_, values_;
};

}  // namespace dlite
