// The twin of dlite/slots.py, step by step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <queue>
#include <stdexcept>
#include <utility>
#include <vector>

namespace dlite {

using Curves = std::vector<std::vector<std::vector<double>>>;

struct Plan {
  std::vector<std::pair<int, int>> picks;
  double rate;
};

// A run of slots that is taken as one: `worth` each, by the request's concave majorant.
struct Run {
  double worth, gain;
  int end;
};

class Menu {
 public:
  explicit Menu(const std::vector<std::vector<double>>& curves) {
    std::size_t longest = 0;
    for (const auto& curve : curves) longest = std::max(longest, curve.size());
    best_.assign(longest + 1, {});
    for (std::size_t option = 0; option < curves.size(); ++option) {
      double total = 0.0;
      for (std::size_t k = 0; k < curves[option].size(); ++k) {
        total += curves[option][k];
        if (total > best_[k + 1].total)
          best_[k + 1] = {total, static_cast<int>(option), static_cast<int>(k + 1)};
      }
    }
    for (std::size_t k = 1; k <= longest; ++k)  // a shorter draft may promise more
      if (best_[k].total < best_[k - 1].total) best_[k] = best_[k - 1];
    for (std::size_t k = 1; k <= longest; ++k) {
      const double gain = best_[k].total - best_[k - 1].total;
      Run run{gain, gain, static_cast<int>(k)};
      while (!runs_.empty() && runs_.back().worth < run.worth) {
        const int begin = runs_.size() > 1 ? runs_[runs_.size() - 2].end : 0;
        run.gain += runs_.back().gain;
        run.worth = run.gain / (run.end - begin);
        runs_.pop_back();
      }
      runs_.push_back(run);
    }
  }

  // The next slot's worth; below 0 at the end.
  double worth() const { return at_ < runs_.size() ? runs_[at_].worth : -1.0; }

  // Takes it, and returns what that really gains.
  double take() {
    ++taken_;
    if (taken_ == runs_[at_].end) ++at_;
    return best_[taken_].total - best_[taken_ - 1].total;
  }

  std::pair<int, int> pick(int taken) const { return {best_[taken].option, best_[taken].length}; }

 private:
  struct Cut {
    double total = 0.0;
    int option = 0, length = 0;
  };
  std::vector<Cut> best_;  // the most that this many slots promise
  std::vector<Run> runs_;
  std::size_t at_ = 0;
  int taken_ = 0;
};

// A token that survives no likelier than this costs more than it can give, in any plan.
inline double worthless(const double* seconds, std::size_t size, double batch) {
  if (size < 2) return 1.0;
  double least = seconds[1] - seconds[0];
  for (std::size_t n = 1; n + 1 < size; ++n) least = std::min(least, seconds[n + 1] - seconds[n]);
  return batch / seconds[0] * least;
}

inline Plan plan(const Curves& options, const double* seconds, std::size_t size, double guard) {
  const double batch = static_cast<double>(options.size());
  Plan best{std::vector<std::pair<int, int>>(options.size(), {0, 0}), batch / seconds[0]};
  const double plain = best.rate;
  std::vector<double> cheapest(size, 0.0);  // the least time of a token from here on
  for (std::size_t n = size - 1; n-- > 0;) {
    const double step = seconds[n + 1] - seconds[n];
    cheapest[n] = n + 2 < size ? std::min(step, cheapest[n + 1]) : step;
  }
  std::vector<Menu> menus(options.begin(), options.end());
  using Next = std::pair<double, int>;  // worth, minus the row: ties go to the earlier row
  std::priority_queue<Next> queue;
  for (std::size_t row = 0; row < menus.size(); ++row)
    if (menus[row].worth() > 0) queue.emplace(menus[row].worth(), -static_cast<int>(row));
  std::vector<int> order;
  std::size_t best_count = 0;
  double tokens = batch, rate = plain;
  for (std::size_t n = 0; n + 1 < size && !queue.empty(); ++n) {
    const auto [worth, negative_row] = queue.top();
    if (worth <= rate * cheapest[n]) break;
    queue.pop();
    Menu& menu = menus[static_cast<std::size_t>(-negative_row)];
    tokens += menu.take();
    order.push_back(-negative_row);
    if (tokens / seconds[n + 1] > rate) {
      rate = tokens / seconds[n + 1];
      best_count = order.size();
    }
    if (menu.worth() > 0) queue.emplace(menu.worth(), negative_row);
  }
  if (rate <= (1 + guard) * plain) return best;
  std::vector<int> taken(options.size(), 0);
  for (std::size_t i = 0; i < best_count; ++i) ++taken[static_cast<std::size_t>(order[i])];
  for (std::size_t row = 0; row < menus.size(); ++row) best.picks[row] = menus[row].pick(taken[row]);
  best.rate = rate;
  return best;
}

}  // namespace dlite
