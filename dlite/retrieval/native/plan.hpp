// The twin of dlite/slots.py, step by step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <queue>
#include <span>
#include <utility>
#include <vector>

namespace dlite {

// The curves that each request can choose from: request b's end before `ends[b]`.
struct Options {
  std::vector<std::span<const double>> curves;
  std::vector<std::size_t> ends;

  void add(std::span<const double> curve) { curves.push_back(curve); }
  void end_request() { ends.push_back(curves.size()); }
};

struct Plan {
  std::vector<std::pair<int, int>> picks;
  double rate;
};

struct Cut {
  double total = 0.0;
  int option = 0, length = 0;
};

// A run of slots that is taken as one: `worth` each, by the request's concave majorant.
struct Run {
  double worth, gain;
  int end;
};

// `best[k]`, one more than there are slots, is the most that k of them promise.
class Menu {
 public:
  Menu(std::span<const std::span<const double>> curves, std::span<Cut> best, Run* runs)
      : best_(best), runs_(runs) {
    for (std::size_t option = 0; option < curves.size(); ++option) {
      double total = 0.0;
      for (std::size_t k = 0; k < curves[option].size(); ++k) {
        total += curves[option][k];
        if (total > best[k + 1].total)
          best[k + 1] = {total, static_cast<int>(option), static_cast<int>(k + 1)};
      }
    }
    for (std::size_t k = 1; k < best.size(); ++k) {
      if (best[k].total < best[k - 1].total) best[k] = best[k - 1];  // a shorter draft may be better
      const double gain = best[k].total - best[k - 1].total;
      Run run{gain, gain, static_cast<int>(k)};
      while (num_runs_ > 0 && runs_[num_runs_ - 1].worth < run.worth) {
        const int begin = num_runs_ > 1 ? runs_[num_runs_ - 2].end : 0;
        run.gain += runs_[num_runs_ - 1].gain;
        run.worth = run.gain / (run.end - begin);
        --num_runs_;
      }
      runs_[num_runs_++] = run;
    }
  }

  // The next slot's worth; below 0 at the end.
  double worth() const { return at_ < num_runs_ ? runs_[at_].worth : -1.0; }

  // Takes it, and returns what that really gains.
  double take() {
    ++taken_;
    if (static_cast<int>(taken_) == runs_[at_].end) ++at_;
    return best_[taken_].total - best_[taken_ - 1].total;
  }

  std::pair<int, int> pick(std::size_t taken) const {
    return {best_[taken].option, best_[taken].length};
  }

 private:
  std::span<Cut> best_;
  Run* runs_;
  std::size_t num_runs_ = 0, at_ = 0, taken_ = 0;
};

// A token that survives no likelier than this costs more than it can give, in any plan.
inline double worthless(const double* seconds, std::size_t size, double batch) {
  if (size < 2) return 1.0;
  double least = seconds[1] - seconds[0];
  for (std::size_t n = 1; n + 1 < size; ++n) least = std::min(least, seconds[n + 1] - seconds[n]);
  return batch / seconds[0] * least;
}

inline Plan plan(const Options& options, const double* seconds, std::size_t size, double guard) {
  const std::size_t rows = options.ends.size();
  const double batch = static_cast<double>(rows);
  Plan best{std::vector<std::pair<int, int>>(rows, {0, 0}), batch / seconds[0]};
  const double plain = best.rate;
  std::vector<double> cheapest(size, 0.0);  // the least time of a token from here on
  for (std::size_t n = size - 1; n-- > 0;) {
    const double step = seconds[n + 1] - seconds[n];
    cheapest[n] = n + 2 < size ? std::min(step, cheapest[n + 1]) : step;
  }
  std::size_t slots = rows;
  for (const auto& curve : options.curves) slots += curve.size();
  std::vector<Cut> cuts(slots);
  std::vector<Run> runs(slots);
  std::vector<Menu> menus;
  menus.reserve(rows);
  for (std::size_t row = 0, begin = 0, at = 0; row < rows; begin = options.ends[row++]) {
    const std::span curves(options.curves.data() + begin, options.ends[row] - begin);
    std::size_t longest = 0;
    for (const auto& curve : curves) longest = std::max(longest, curve.size());
    menus.emplace_back(curves, std::span(cuts.data() + at, longest + 1), runs.data() + at);
    at += longest + 1;
  }
  using Next = std::pair<double, int>;  // worth, minus the row: ties go to the earlier row
  std::vector<Next> waiting;
  waiting.reserve(rows);
  std::priority_queue queue(std::less<Next>(), std::move(waiting));
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
  std::vector<std::size_t> taken(rows, 0);
  for (std::size_t i = 0; i < best_count; ++i) ++taken[static_cast<std::size_t>(order[i])];
  for (std::size_t row = 0; row < menus.size(); ++row) best.picks[row] = menus[row].pick(taken[row]);
  best.rate = rate;
  return best;
}

}  // namespace dlite
