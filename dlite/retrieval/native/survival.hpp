// Survival curves: the twin of dlite/survival.py, which gives it all its figures.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace dlite {

namespace nb = nanobind;

// `survival[k]`: the first k + 1 tokens are all accepted; `expected[k]`: of the first k.
struct Curve {
  static constexpr int kLongest = 64;
  std::array<double, kLongest> survival;
  std::array<double, kLongest + 1> expected;
};

enum Agreement : std::size_t { once, unanimous, majority, minority };

// Cells are numbered by source, match bucket and support bucket.
class Prior {
 public:
  using Hazards = nb::ndarray<const double, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

  Prior(Hazards hazards, std::vector<int> match_starts, const std::vector<int>& position_starts,
        double weight, double decay)
      : weight(weight), decay(decay), positions(position_starts.size()),
        match_starts_(std::move(match_starts)),
        hazards_(hazards.data(), hazards.data() + hazards.size()) {
    for (int j = 1; j <= Curve::kLongest; ++j) position_[index(j - 1)] = bucket(position_starts, j);
    for (std::size_t cell = 0; cell < num_cells(); ++cell) curves_.push_back(curve(hazards_of(cell)));
  }

  std::size_t num_cells() const { return hazards_.size() / positions; }
  const double* hazards_of(std::size_t cell) const { return hazards_.data() + cell * positions; }
  const Curve& operator[](std::size_t cell) const { return curves_[cell]; }
  std::size_t position(int j) const { return position_[index(j)]; }

  std::size_t cell_of(int source, int match_length, int support, int votes) const {
    Agreement agreement = 2 * votes > support ? majority : minority;
    if (support == 1) agreement = once;
    else if (votes == support) agreement = unanimous;
    return cell(source, match_length, agreement);
  }

  std::size_t cell(int source, int match_length, Agreement agreement) const {
    const std::size_t match = bucket(match_starts_, match_length);
    return (index(source) * match_starts_.size() + match) * 4 + agreement;
  }

  Curve curve(const double* hazards) const {
    Curve made;
    double product = 1.0, sum = 0.0;
    made.expected[0] = 0.0;
    for (std::size_t j = 0; j < Curve::kLongest; ++j) {
      product *= hazards[position_[j]];
      sum += product;
      made.survival[j] = product;
      made.expected[j + 1] = sum;
    }
    return made;
  }

  const double weight, decay;
  const std::size_t positions;

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }
  static std::size_t bucket(const std::vector<int>& starts, int value) {
    return index(static_cast<int>(std::upper_bound(starts.begin(), starts.end(), value) -
                                  starts.begin()) - 1);
  }

  std::vector<int> match_starts_;
  std::array<std::size_t, Curve::kLongest> position_;
  std::vector<double> hazards_;
  std::vector<Curve> curves_;
};

// A session's own estimates: counts for the cells that it has seen.
class Survival {
 public:
  explicit Survival(nb::object prior)
      : owner_(std::move(prior)), prior_(nb::cast<const Prior&>(owner_)),
        cells_(prior_.num_cells()) {}
  Survival(const Survival&) = delete;
  Survival& operator=(const Survival&) = delete;

  const Prior& prior() const { return prior_; }

  const Curve& of(std::size_t cell) {
    if (!cells_[cell]) return prior_[cell];
    Cell& own = *cells_[cell];
    if (own.stale) {
      std::vector<double> hazards(prior_.positions);
      for (std::size_t p = 0; p < hazards.size(); ++p)
        hazards[p] = (prior_.weight * prior_.hazards_of(cell)[p] + own.counts[p].first) /
                     (prior_.weight + own.counts[p].second);
      own.curve = prior_.curve(hazards.data());
      own.stale = false;
    }
    return own.curve;
  }

  void observe(std::size_t cell, int drafted, int accepted) {
    if (!cells_[cell]) {
      cells_[cell] = std::make_unique<Cell>();
      cells_[cell]->counts.resize(prior_.positions);
    }
    Cell& own = *cells_[cell];
    const int seen = std::min({accepted + 1, drafted, Curve::kLongest});
    for (int j = 0; j < seen; ++j) {
      auto& [successes, observed] = own.counts[prior_.position(j)];
      successes = prior_.decay * successes + (j < accepted ? 1.0 : 0.0);
      observed = prior_.decay * observed + 1.0;
    }
    own.stale = true;
  }

 private:
  struct Cell {
    std::vector<std::pair<double, double>> counts;  // accepted and observed, by position bucket
    Curve curve;
    bool stale = true;
  };

  nb::object owner_;  // keeps the prior alive
  const Prior& prior_;
  std::vector<std::unique_ptr<Cell>> cells_;
};

}  // namespace dlite
