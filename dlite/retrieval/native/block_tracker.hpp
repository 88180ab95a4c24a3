// In which block a stream of tokens is: block_tracker.py, step by step.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "block_machine.hpp"

namespace dlite {

namespace nb = nanobind;

using Int32Array = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A structure, and the bytes of a tokenizer's tokens; trackers that look ahead share them.
struct Grammar {
  Grammar(nb::handle structure, nb::object token_table)
      : structure(pairs_of(structure), nb::cast<std::vector<int>>(structure.attr("top"))),
        table(std::move(token_table)),
        blob(nb::cast<nb::bytes>(table.attr("blob"))),
        kinds(nb::cast<nb::bytes>(table.attr("kinds"))),
        offsets(nb::cast<Int32Array>(table.attr("offsets"), false)) {
    if (offsets.size() != kinds.size() + 1)
      throw std::invalid_argument("the token table's offsets and kinds don't fit; build it again");
  }

  static std::vector<Pair> pairs_of(nb::handle structure) {
    std::vector<Pair> pairs;
    for (nb::handle pair : structure.attr("pairs")) {
      const auto open = nb::cast<nb::bytes>(pair.attr("open"));
      const auto close = nb::cast<nb::bytes>(pair.attr("close"));
      pairs.push_back({std::string(open.c_str(), open.size()),
                       std::string(close.c_str(), close.size()),
                       static_cast<Mode>(nb::cast<int>(pair.attr("mode"))),
                       nb::cast<int>(pair.attr("group")),
                       nb::cast<std::vector<int>>(pair.attr("inner"))});
    }
    return pairs;
  }

  Structure structure;
  nb::object table;
  nb::bytes blob, kinds;
  Int32Array offsets;
};

class BlockTracker {
 public:
  BlockTracker(nb::handle structure, nb::object table)
      : grammar_(std::make_shared<Grammar>(structure, std::move(table))) {}

  int pair() const {
    if (state_.pending_size == 0 && state_.line == TrackerState::elsewhere) return state_.top();
    TrackerState ended = state_;
    Machine(grammar_->structure, ended).end();
    return ended.top();
  }

  int block() const {
    const int open = pair();
    return open < 0 ? 0 : grammar_->structure.pairs[static_cast<std::size_t>(open)].group;
  }

  void feed_token(std::int64_t token) {
    enum Kind { text, added, special };
    const auto known = static_cast<std::int64_t>(grammar_->kinds.size());
    if (token < 0 || token >= known) return reset();
    const int kind = grammar_->kinds.c_str()[token];
    const std::int32_t begin = grammar_->offsets.data()[token];
    const std::int32_t end = grammar_->offsets.data()[token + 1];
    if (begin < 0 || end < begin || static_cast<std::size_t>(end) > grammar_->blob.size())
      throw std::invalid_argument("the token table is broken; build it again");
    const char* data = grammar_->blob.c_str() + begin;
    const auto size = static_cast<std::size_t>(end - begin);
    const bool is_text = kind == text || kind == added;
    if (is_text || (kind == special && grammar_->structure.mentions(std::string(data, size)))) {
      take(data, size);
    } else {
      reset();
    }
  }

  std::vector<int> feed(nb::handle tokens) {
    std::vector<int> labels;
    for (nb::handle token : nb::iter(tokens)) {
      labels.push_back(block());
      feed_token(nb::cast<std::int64_t>(token));
    }
    return labels;
  }

  std::size_t cut(nb::handle tokens) const {
    BlockTracker ahead = *this;
    const int open = block();
    std::size_t kept = 0;
    for (nb::handle token : nb::iter(tokens)) {
      ahead.feed_token(nb::cast<std::int64_t>(token));
      ++kept;
      if (ahead.block() != open) break;
    }
    return kept;
  }

  void take(const char* data, std::size_t size) {
    Machine(grammar_->structure, state_).take(data, size);
  }
  void reset() { state_ = {}; }

 private:
  std::shared_ptr<Grammar> grammar_;
  TrackerState state_;
};

}  // namespace dlite
