// Which blocks an output consists of: structure.py, and block_machine.py's scopes.
#pragma once

#include <algorithm>
#include <bitset>
#include <string>
#include <utility>
#include <vector>

namespace dlite {

enum class Mode : int { raw = 0, json = 1, fence = 2, escape = 3 };

struct Pair {
  std::string open, close;
  Mode mode;
  int group;
  std::vector<int> inner;

  int fence_run() const {
    const std::size_t other = open.find_first_not_of(open[0]);
    return static_cast<int>(other == std::string::npos ? open.size() : other);
  }
  std::string fence_info() const { return open.substr(static_cast<std::size_t>(fence_run())); }
};

class Structure {
 public:
  static constexpr int kClose = -1;

  struct Delimiter {
    std::string text;
    int action;  // the pair that it opens, or kClose
    bool hidden_by_escape;
  };

  struct Scope {
    std::vector<Delimiter> delimiters;
    std::bitset<256> starts;
    std::vector<int> fences;
    std::bitset<256> fence_bytes;
  };

  Structure(std::vector<Pair> all, const std::vector<int>& top) : pairs(std::move(all)) {
    scopes.push_back(scope(-1, top));
    for (std::size_t p = 0; p < pairs.size(); ++p)
      scopes.push_back(scope(static_cast<int>(p), pairs[p].inner));
  }

  bool mentions(const std::string& data) const {
    return std::any_of(pairs.begin(), pairs.end(), [&](const Pair& pair) {
      return pair.open.find(data) != std::string::npos ||
             pair.close.find(data) != std::string::npos;
    });
  }

  std::vector<Pair> pairs;
  std::vector<Scope> scopes;  // at top level, then per pair

 private:
  Scope scope(int place, const std::vector<int>& inner) const {
    Scope made;
    const auto add = [&](const std::string& text, int action, Mode mode) {
      made.delimiters.push_back({text, action, mode == Mode::escape});
      made.starts.set(static_cast<unsigned char>(text[0]));
    };
    for (const int p : inner) {
      const Pair& pair = pairs[static_cast<std::size_t>(p)];
      if (pair.mode != Mode::fence) {
        add(pair.open, p, pair.mode);
        continue;
      }
      made.fences.push_back(p);
      made.fence_bytes.set(static_cast<unsigned char>(pair.open[0]));
    }
    if (place < 0) return made;
    const Pair& around = pairs[static_cast<std::size_t>(place)];
    if (around.mode == Mode::fence) {
      made.fence_bytes.set(static_cast<unsigned char>(around.open[0]));
      return made;
    }
    // The same text closes rather than opens: it is the only one of its kind then.
    std::erase_if(made.delimiters, [&](const Delimiter& d) { return d.text == around.close; });
    add(around.close, kClose, around.mode);
    return made;
  }
};

}  // namespace dlite
