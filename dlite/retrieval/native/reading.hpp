// A step's drafts for all running calls, in one call: the twin of Memory.look (dlite/drafters/
// memory.py) and of the choice that the retrieval drafters make among what it finds.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "block_tracker.hpp"
#include "calling.hpp"
#include "drafts.hpp"
#include "marks.hpp"
#include "plan.hpp"
#include "source.hpp"
#include "survival.hpp"

namespace dlite {

struct Origin {
  nb::object held, held_marks;
  Source* source;
  const Marks* marks;  // of a lane, or of the workspace's forms; null: the engine says no places
  SourceClass kind;    // prompt: a lane
  Rule rule;
};

// How far a call's tokens are known, and what it looks into. The own lane stands first.
struct Reader {
  std::int64_t own = 0, seen = 0;  // tokens that the own index has, and that all others have
  int block = 0;
  std::int64_t label = 0;  // who writes now: who << 32 | block; a block of 0 is a prompt
  nb::object held_tracker, held_survival, names;  // `names`: of the workspace's drafts, by mark
  BlockTracker* tracker = nullptr;
  Survival* survival = nullptr;
  std::vector<Origin> origins;

  explicit Reader(nb::object followed) : held_tracker(std::move(followed)) {
    if (!held_tracker.is_none()) tracker = nb::cast<BlockTracker*>(held_tracker);
  }

  void learn(nb::object estimates) {
    held_survival = std::move(estimates);
    survival = nb::cast<Survival*>(held_survival);
  }

  void connect(nb::list sources, nb::list rules, nb::object form_names) {
    origins.clear();
    names = std::move(form_names);
    for (nb::handle one : sources) {
      const auto kind = static_cast<SourceClass>(nb::cast<int>(one[2]));
      const std::size_t group = kind == prompt ? 0 : kind == workspace ? 1 : 2;
      origins.push_back({nb::borrow(one[0]), nb::borrow(one[1]), nb::cast<Source*>(one[0]),
                         one[1].is_none() ? nullptr : nb::cast<const Marks*>(one[1]), kind,
                         static_cast<Rule>(nb::cast<int>(rules[group]))});
    }
  }

  SourceClass source_class(const Origin& origin, const Found& found) const {
    if (origin.kind != prompt || found.start < 0) return origin.kind;
    const std::int64_t written = origin.marks->at(found.start);
    if ((written & 0xFFFFFFFF) == 0) return prompt;
    if (written == label) return same_block;
    return (written & 0xFFFFFFFF) == (label & 0xFFFFFFFF) ? other_query : other_block;
  }
};

// `delta` >= 0: the longest match, a static one only if it is longer by more; else what promises
// most, cut where its survival falls under `threshold`.
struct Policy {
  int delta;
  double threshold;
};

using Seconds = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

class Round {
 public:
  Round(nb::list calls, nb::list views, Policy policy) : policy_(policy) {
    const std::size_t size = nb::len(calls);
    rows_.resize(size);
    for (std::size_t i = 0; i < size; ++i) {
      rows_[i].max_draft = number(views[i], names().max_draft);
      longest_ = std::max(longest_, rows_[i].max_draft);
      if (!calls[i].is_none()) read(rows_[i], calls[i], views[i]);
    }
    for (const bool live : {true, false})
      for (Row& row : rows_)
        if (row.reader)
          for (std::size_t k = 0; k < row.reader->origins.size(); ++k) {
            Origin& origin = row.reader->origins[k];
            if ((origin.kind == prompt) != live) continue;
            const std::size_t begin = k == 0 ? row.own : row.seen;
            jobs_.push_back({&row, &origin, begin, row.end - begin});
            sources_.push_back(origin.source);
          }
  }

  void search() {
    nb::gil_scoped_release released;
    const Locks locks(sources_);
    for (const Source* source : sources_) source->check_open();
    const std::int32_t* tokens = in_.tokens.data();
    for (int stage = 0; stage < Source::kStages; ++stage)
      for (const Job& job : jobs_)
        job.origin->source->prefetch(stage, tokens + job.begin, job.count);
    for (const Job& job : jobs_)
      if (job.count > 0) job.origin->source->extend(tokens + job.begin, job.count);
    for (int stage = 0; stage < Source::kFindStages; ++stage)
      for (const Job& job : jobs_) job.origin->source->prefetch_find(stage, job.origin->rule);
    for (const Job& job : jobs_) consider(*job.row, *job.origin);
    for (Row& row : rows_)
      while (row.curve && row.length > 0 &&
             row.curve->survival[static_cast<std::size_t>(row.length - 1)] < policy_.threshold)
        --row.length;
  }

  // Cuts the drafts to the slots that are worth their time; see plan.hpp.
  void plan_within(const double* seconds, std::size_t size, double guard) {
    const double least = worthless(seconds, size, static_cast<double>(rows_.size()));
    Options options;
    for (const Row& row : rows_) {
      const double* from = row.best ? row.curve->survival.data() : nullptr;
      const double* end = from + row.length;
      options.add({from, std::find_if(from, end, [&](double s) { return s <= least; })});
      options.end_request();
    }
    const Plan made = plan(options, seconds, size, guard);
    for (std::size_t i = 0; i < rows_.size(); ++i) rows_[i].length = made.picks[i].second;
  }

  nb::list drafts(nb::object nothing) const {
    nb::list made;
    for (const Row& row : rows_) made.append(row.best ? draft(row) : empty(nothing));
    return made;
  }

 private:
  struct Row {
    nb::object held;
    Reader* reader = nullptr;
    std::size_t own = 0, seen = 0, end = 0;  // places in `in_`
    int max_draft = 0;
    const Origin* best = nullptr;
    Found found{};
    SourceClass source = prompt;
    std::size_t begin = 0;  // in `out_`
    int length = 0;
    double promised = 0.0;
    const Curve* curve = nullptr;
  };
  struct Job {
    Row* row;
    Origin* origin;
    std::size_t begin, count;
  };

  // What of the call's tokens is new; whatever is out of the ordinary is left to Python.
  void read(Row& row, nb::handle call, nb::handle view) {
    row.held = get(call, names().reader);
    Reader& reader = *nb::cast<Reader*>(row.held);
    const nb::object tokens = get(view, names().tokens);
    const auto size = static_cast<std::int64_t>(nb::len(tokens)), start = reader.seen;
    const std::size_t begin = in_.tokens.size();
    if (PyList_Check(tokens.ptr())) {
      for (std::int64_t i = start; i < size; ++i)
        take_token(in_.tokens, PyList_GetItem(tokens.ptr(), i));
    } else {
      take_tokens(in_.tokens, tokens[nb::slice(nb::int_(start), nb::none(), nb::none())]);
    }
    const nb::object version = get(get(call, names().session), names().version);
    const nb::object own_version = get(call, names().version);
    bool ordinary = own_version.is(version) || own_version.equal(version);
    std::vector<int> blocks;
    if (reader.tracker) {
      for (std::size_t i = begin; i <= in_.tokens.size(); ++i) {
        const int block = reader.tracker->block();
        blocks.push_back(block);
        ordinary = ordinary && block == reader.block;
        if (i < in_.tokens.size()) reader.tracker->feed_token(in_.tokens[i]);
      }
    }
    if (ordinary) {
      set(call, names().tokens, tokens);
      reader.own = reader.seen = start;
    } else {
      call.attr("turn")(tokens, nb::cast(blocks));
    }
    row.reader = &reader;
    row.own = begin + static_cast<std::size_t>(reader.own - start);
    row.seen = begin + static_cast<std::size_t>(reader.seen - start);
    row.end = in_.tokens.size();
    reader.own = reader.seen = size;
  }

  // Whether an origin can't give what beats the row's best: then its tokens needn't be looked for.
  bool is_hopeless(const Row& row, const Origin& origin) const {
    const Outlook seen = origin.source->outlook();
    if (seen.length < 0) return false;
    if (seen.length == 0) return true;
    if (policy_.delta >= 0) return !is_better(row, origin, seen.length);
    Survival& survival = *row.reader->survival;
    const auto length = static_cast<std::size_t>(std::min(row.max_draft, Curve::kLongest));
    const int first = origin.kind == prompt ? same_block : origin.kind;
    const bool is_once = seen.support == 1;
    for (int source = first; source <= origin.kind; ++source)
      for (const Agreement agreement : {once, unanimous, majority, minority}) {
        if (seen.support > 0 && (agreement == once) != is_once) continue;
        if (seen.splits && agreement == unanimous) continue;
        const std::size_t cell = survival.prior().cell(source, seen.length, agreement);
        if (survival.of(cell).expected[length] > row.promised) return false;
      }
    return true;
  }

  bool is_better(const Row& row, const Origin& origin, int match_length) const {
    const bool behind = row.best && origin.kind == global_corpus;
    return match_length > row.promised + (behind ? policy_.delta : 0);
  }

  void consider(Row& row, const Origin& origin) {
    if (policy_.delta < 0 && !row.reader->survival) return;
    if (row.best && is_hopeless(row, origin)) return;
    const std::size_t begin = out_.tokens.size();
    const Found found = origin.source->find(origin.rule, longest_, out_.tokens);
    if (found.length == 0) return;
    const Reader& reader = *row.reader;
    int length = std::min(static_cast<int>(out_.tokens.size() - begin), row.max_draft);
    SourceClass source = origin.kind;
    const Curve* curve = nullptr;
    double promised = found.length;
    if (policy_.delta < 0) {
      length = std::min(length, Curve::kLongest);
      source = reader.source_class(origin, found);
      const Prior& prior = reader.survival->prior();
      curve = &reader.survival->of(
          prior.cell_of(source, found.length, found.support, found.count));
      promised = curve->expected[static_cast<std::size_t>(length)];
      if (promised <= row.promised) return;
    } else {
      if (!is_better(row, origin, found.length)) return;
      source = reader.source_class(origin, found);
    }
    row.best = &origin;
    row.found = found;
    row.source = source;
    row.begin = begin;
    row.length = length;
    row.promised = promised;
    row.curve = curve;
  }

  nb::object draft(const Row& row) const {
    const Found& found = row.found;
    nb::object evidence = fresh(names().evidence_type);
    set(evidence, names().source, names().classes[row.source]);
    set(evidence, names().match_length, nb::int_(found.length));
    set(evidence, names().support, nb::int_(found.support));
    set(evidence, names().votes, nb::int_(found.count));
    set(evidence, names().agreed, nb::int_(found.agreed));
    nb::object survival = nb::none();
    if (row.curve) survival = numbers(row.curve->survival.data(), row.length, PyFloat_FromDouble);
    const nb::object tokens = numbers(out_.tokens.data() + row.begin, row.length, PyLong_FromLong);
    return new_draft(tokens, survival, name(row), evidence);
  }

  nb::object name(const Row& row) const {
    if (row.best->kind == prompt) return nb::borrow(names().session_name);
    if (row.best->kind == global_corpus) return nb::borrow(names().global_name);
    if (row.found.start < 0) return nb::borrow(names().workspace_name);
    return nb::borrow(row.reader->names[row.best->marks->at(row.found.start)]);
  }

  Policy policy_;
  int longest_ = 0;
  Scratch in_, out_;
  std::vector<Row> rows_;
  std::vector<Job> jobs_;
  std::vector<Source*> sources_;
};

inline nb::list propose(nb::list calls, nb::list views, int delta, double threshold,
                        nb::object nothing, nb::object seconds, double guard) {
  Round round(calls, views, {delta, threshold});
  round.search();
  if (!seconds.is_none()) {
    const auto times = nb::cast<Seconds>(seconds, false);
    round.plan_within(times.data(), times.size(), guard);
  }
  return round.drafts(std::move(nothing));
}

}  // namespace dlite
