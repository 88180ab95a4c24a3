// The pushdown automaton over bytes: block_machine.py, step by step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "structure.hpp"

namespace dlite {

// All that the past leaves behind. Copied as it is to look ahead.
struct TrackerState {
  static constexpr int kMaxDepth = 8;
  enum Line : std::uint8_t { elsewhere, run_of_fence, info_of_fence, tail_of_fence };

  std::int8_t depth = 0;
  Line line = elsewhere;
  bool hidden = false, in_string = false, escaped = false;
  std::int8_t indent = 0;
  std::uint8_t fence_byte = 0, run = 0, pending_size = 0, info_size = 0;
  std::uint8_t pairs[kMaxDepth], runs[kMaxDepth];
  char pending[64], info[64];

  int top() const { return depth ? pairs[depth - 1] : -1; }
};

class Machine {
 public:
  Machine(const Structure& structure, TrackerState& state) : structure_(structure), state_(state) {}

  void take(const char* data, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
      push(data[i]);
      while (waiting_) step(waiting_bytes_[--waiting_]);
    }
  }

  void end() {
    TrackerState& s = state_;
    while (waiting_ || s.line != TrackerState::elsewhere || s.pending_size) {
      if (waiting_) {
        step(waiting_bytes_[--waiting_]);
      } else if (s.line == TrackerState::tail_of_fence ||
                 (s.line == TrackerState::run_of_fence && run_closes())) {
        close();
      } else if (s.line == TrackerState::info_of_fence ||
                 (s.line == TrackerState::run_of_fence && run_opens())) {
        open_fence();
      } else if (s.line == TrackerState::run_of_fence) {
        plain_run();
      } else {
        decide();
      }
    }
  }

 private:
  using Scope = Structure::Scope;

  void push(char byte) { waiting_bytes_[waiting_++] = byte; }

  const Pair& pair(int p) const { return structure_.pairs[static_cast<std::size_t>(p)]; }
  const Scope& scope() const {
    return structure_.scopes[static_cast<std::size_t>(state_.top() + 1)];
  }

  void step(char byte) {
    TrackerState& s = state_;
    if (s.line == TrackerState::run_of_fence) {
      if (static_cast<std::uint8_t>(byte) == s.fence_byte) {
        if (s.run < 255) ++s.run;
        return;
      }
      if (run_closes()) {
        s.line = TrackerState::tail_of_fence;
      } else if (run_opens()) {
        s.line = TrackerState::info_of_fence;
      } else {
        push(byte);
        plain_run();
        return;
      }
    }
    if (s.line == TrackerState::tail_of_fence) {
      if (byte == '\n') {
        close();
        s.indent = 0;
        return;
      }
      if (byte == ' ' || byte == '\t' || byte == '\r') return;
      leave_line();
    } else if (s.line == TrackerState::info_of_fence) {
      if (byte == '\n') {
        open_fence();
        s.indent = 0;
        return;
      }
      if (byte != '`' || s.fence_byte != '`') {
        const bool leading = s.info_size == 0 && is_blank(byte);
        if (!leading && s.info_size < sizeof(s.info)) s.info[s.info_size++] = byte;
        return;
      }
      leave_line();
    }
    const bool starts_line = s.pending_size == 0 && s.indent >= 0 && !s.in_string;
    if (starts_line && scope().fence_bytes[static_cast<std::uint8_t>(byte)]) {
      s.line = TrackerState::run_of_fence;
      s.fence_byte = static_cast<std::uint8_t>(byte);
      s.run = 1;
      s.info_size = 0;
      return;
    }
    ordinary(byte);
  }

  // What Python's bytes.lstrip() drops.
  static bool is_blank(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

  void ordinary(char byte) {
    TrackerState& s = state_;
    if (s.pending_size == 0 && (s.in_string || !scope().starts[static_cast<std::uint8_t>(byte)])) {
      text(byte);
      return;
    }
    s.pending[s.pending_size++] = byte;
    for (const auto& delimiter : scope().delimiters)
      if (counts(delimiter) && delimiter.text.size() > s.pending_size &&
          std::memcmp(delimiter.text.data(), s.pending, s.pending_size) == 0)
        return;
    decide();
  }

  bool counts(const Structure::Delimiter& delimiter) const {
    return !state_.in_string && !(state_.hidden && delimiter.hidden_by_escape);
  }

  // Consumes a delimiter, or one byte of text; the rest of what was pending waits again.
  void decide() {
    TrackerState& s = state_;
    const std::size_t size = s.pending_size;
    const Structure::Delimiter* found = nullptr;
    for (const auto& delimiter : scope().delimiters)
      if (counts(delimiter) && delimiter.text.size() <= size &&
          std::memcmp(delimiter.text.data(), s.pending, delimiter.text.size()) == 0 &&
          (!found || delimiter.text.size() > found->text.size()))
        found = &delimiter;
    const std::size_t consumed = found ? found->text.size() : 1;
    for (std::size_t i = size; i > consumed; --i) push(s.pending[i - 1]);
    s.pending_size = 0;
    if (!found) {
      text(s.pending[0]);
    } else if (found->action == Structure::kClose) {
      close();
    } else {
      open(found->action, 0);
    }
  }

  void open(int p, std::uint8_t run) {
    TrackerState& s = state_;
    if (s.depth < TrackerState::kMaxDepth) {
      s.pairs[s.depth] = static_cast<std::uint8_t>(p);
      s.runs[s.depth] = run;
      ++s.depth;
    }
    leave_line();
  }

  void close() {
    --state_.depth;
    leave_line();
  }

  void leave_line() {
    TrackerState& s = state_;
    s.line = TrackerState::elsewhere;
    s.indent = -1;
    s.hidden = s.in_string = s.escaped = false;
  }

  void text(char byte) {
    TrackerState& s = state_;
    s.hidden = byte == '\\' && !s.hidden;
    if (byte == '\n') {
      s.indent = 0;
    } else {
      s.indent = static_cast<std::int8_t>(byte == ' ' && s.indent >= 0 && s.indent < 3
                                              ? s.indent + 1 : -1);
    }
    if (s.depth && pair(s.top()).mode == Mode::json) json(byte);
  }

  void json(char byte) {
    TrackerState& s = state_;
    if (!s.in_string) {
      s.in_string = byte == '"';
    } else if (s.escaped) {
      s.escaped = false;
    } else if (byte == '\\') {
      s.escaped = true;
    } else if (byte == '"' || byte == '\n') {
      s.in_string = false;
    }
  }

  bool run_closes() const {
    const TrackerState& s = state_;
    if (!s.depth || pair(s.top()).mode != Mode::fence) return false;
    return static_cast<std::uint8_t>(pair(s.top()).open[0]) == s.fence_byte &&
           s.run >= s.runs[s.depth - 1];
  }

  bool long_enough(int p) const {
    return static_cast<std::uint8_t>(pair(p).open[0]) == state_.fence_byte &&
           state_.run >= pair(p).fence_run();
  }

  bool run_opens() const {
    const auto& fences = scope().fences;
    return std::any_of(fences.begin(), fences.end(), [&](int p) { return long_enough(p); });
  }

  void open_fence() {
    const TrackerState& s = state_;
    int best = -1;
    for (const int p : scope().fences) {
      const std::string info = pair(p).fence_info();
      const bool fits = info.size() <= s.info_size &&
                        std::memcmp(info.data(), s.info, info.size()) == 0;
      if (long_enough(p) && fits && (best < 0 || info.size() > pair(best).fence_info().size()))
        best = p;
    }
    if (best >= 0) {
      open(best, s.run);
    } else {
      leave_line();
    }
  }

  void plain_run() {
    TrackerState& s = state_;
    const char byte = static_cast<char>(s.fence_byte);
    s.line = TrackerState::elsewhere;
    for (int i = 1; i < s.run; ++i) push(byte);
    ordinary(byte);
  }

  const Structure& structure_;
  TrackerState& state_;
  char waiting_bytes_[512];
  int waiting_ = 0;
};

}  // namespace dlite
