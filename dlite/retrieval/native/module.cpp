// Python's side of the engines: one lock per corpus, and no GIL while they work.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>

#include "calling.hpp"
#include "cursors.hpp"
#include "plan.hpp"
#include "reading.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace dlite {
namespace {

Rule checked_rule(int rule) {
  if (rule < 0 || rule > 3)
    throw std::invalid_argument("rule is " + std::to_string(rule) + "; give one of [0, 1, 2, 3]");
  return static_cast<Rule>(rule);
}

// dlite.retrieval.base.Continuation, whose instances are tuples.
nb::object continuation(const Found& found, const std::int32_t* tokens, std::size_t count) {
  static PyObject* const type =
      nb::object(nb::module_::import_("dlite.retrieval.base").attr("Continuation")).release().ptr();
  nb::object made =
      nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 6));
  if (!made.is_valid()) nb::raise_python_error();
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(count));
  if (!list) nb::raise_python_error();
  for (std::size_t i = 0; i < count; ++i)
    PyList_SetItem(list, static_cast<Py_ssize_t>(i), PyLong_FromLong(tokens[i]));
  PyTuple_SetItem(made.ptr(), 0, list);
  const std::int32_t fields[] = {found.length, found.support, found.count, found.start,
                                 found.agreed};
  for (int i = 0; i < 5; ++i) PyTuple_SetItem(made.ptr(), i + 1, PyLong_FromLong(fields[i]));
  return made;
}

// Under the source's lock, and without the GIL where the work may be long or the lock is taken.
template <class Work>
auto locked(Source& source, bool is_short, Work&& work) {
  if (is_short) {
    const std::unique_lock lock(source.guard(), std::try_to_lock);
    if (lock.owns_lock()) {
      source.check_open();
      return work();
    }
  }
  nb::gil_scoped_release released;
  const std::lock_guard lock(source.guard());
  source.check_open();
  return work();
}

constexpr std::size_t kFewTokens = 64;

void extend(Source& source, nb::handle tokens) {
  Scratch in;
  take_tokens(in.tokens, tokens);
  locked(source, in.tokens.size() < kFewTokens,
         [&] { source.extend(in.tokens.data(), in.tokens.size()); });
}

nb::object find(Source& source, int rule, int max_tokens) {
  const Rule checked = checked_rule(rule);
  Scratch out;
  const Found found =
      locked(source, true, [&] { return source.find(checked, max_tokens, out.tokens); });
  return continuation(found, out.tokens.data(), out.tokens.size());
}

nb::list step(nb::sequence sources, nb::sequence tokens, int rule, int max_tokens) {
  const Rule checked = checked_rule(rule);
  std::vector<nb::object> held;
  for (nb::handle source : sources) {
    held.push_back(nb::borrow(source));
    for (int line = 0; line < 6; ++line)
      __builtin_prefetch(reinterpret_cast<const char*>(source.ptr()) + 64 * line);
  }
  std::vector<Source*> all;
  for (const nb::object& source : held) all.push_back(nb::cast<Source*>(source));
  Scratch in, out;
  std::vector<std::size_t> in_ends, out_ends;
  for (nb::handle new_tokens : tokens) {
    take_tokens(in.tokens, new_tokens);
    in_ends.push_back(in.tokens.size());
  }
  if (in_ends.size() != all.size())
    throw std::invalid_argument("there are " + std::to_string(all.size()) + " sources and " +
                                std::to_string(in_ends.size()) +
                                " lists of tokens; give one list per source");
  std::vector<Found> found(all.size());
  {
    nb::gil_scoped_release released;
    const Locks locks(all);
    const auto each = [&](auto&& work) {
      std::size_t begin = 0;
      for (std::size_t i = 0; i < all.size(); ++i) {
        work(*all[i], in.tokens.data() + begin, in_ends[i] - begin);
        begin = in_ends[i];
      }
    };
    for (const Source* source : all) source->check_open();
    for (int stage = 0; stage < Source::kStages; ++stage)
      each([&](Source& source, auto* new_tokens, std::size_t count) {
        source.prefetch(stage, new_tokens, count);
      });
    each([&](Source& source, auto* new_tokens, std::size_t count) {
      if (count > 0) source.extend(new_tokens, count);
    });
    for (int stage = 0; stage < Source::kFindStages; ++stage)
      for (Source* source : all) source->prefetch_find(stage, checked);
    for (std::size_t i = 0; i < all.size(); ++i) {
      found[i] = all[i]->find(checked, max_tokens, out.tokens);
      out_ends.push_back(out.tokens.size());
    }
  }
  nb::list result;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    result.append(continuation(found[i], out.tokens.data() + begin, out_ends[i] - begin));
    begin = out_ends[i];
  }
  return result;
}

template <class Index>
void bind_index(nb::class_<Index, Source>& bound) {
  bound
      .def("end_segment", [](Index& self) { locked(self, true, [&] { self.end_segment(); }); })
      .def("__len__",
           [](Index& self) { return locked(self, true, [&] { return self.text_size(); }); })
      .def("used_bytes",
           [](Index& self) { return locked(self, true, [&] { return self.used_bytes(); }); })
      .def("allocated_bytes",
           [](Index& self) { return locked(self, true, [&] { return self.allocated_bytes(); }); })
      .def("memory_ranges", &Index::memory_ranges)
      .def("wipe",
           [](Index& self) {
             nb::gil_scoped_release released;
             const std::lock_guard lock(self.guard());
             self.wipe_all();
           })
      .def("close", [](Index& self) {
        nb::gil_scoped_release released;
        const std::lock_guard lock(self.guard());
        self.close();
      });
}

nb::object frozen_arrays(Automaton& automaton) {
  auto* columns = new FrozenColumns(
      locked(automaton, false, [&] { return freeze(automaton); }));
  const nb::capsule owner(columns, [](void* p) noexcept { delete static_cast<FrozenColumns*>(p); });
  nb::dict arrays;
  for (std::size_t i = 0; i < columns->size(); ++i)
    arrays[kFrozenNames[i]] = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>(
        (*columns)[i].data(), {(*columns)[i].size()}, owner);
  return nb::module_::import_("dlite.retrieval.frozen").attr("FrozenArrays")(**arrays);
}

// A corpus and the arrays that it looks into.
struct HeldFrozen {
  nb::object arrays;
  Frozen frozen;
};

HeldFrozen hold(nb::object arrays, int search_bound) {
  arrays.attr("check")();
  std::array<Array, kFrozenNames.size()> views;
  for (std::size_t i = 0; i < views.size(); ++i) {
    const auto array = nb::cast<Int32Array>(arrays.attr(kFrozenNames[i]), false);
    views[i] = {array.data(), array.size()};
  }
  return {std::move(arrays), Frozen(views, search_bound)};
}

// The lists are read as far as their tokens can pay.
std::pair<std::vector<std::pair<int, int>>, double> plan_lists(
    nb::list options, nb::ndarray<const double, nb::ndim<1>, nb::c_contig> seconds,
    double guard) {
  const double* times = seconds.data();
  const double least = worthless(times, seconds.size(), static_cast<double>(nb::len(options)));
  std::vector<std::vector<double>> held;
  Options read_options;
  for (nb::handle menu : options) {
    for (nb::handle curve : nb::cast<nb::list>(menu)) {
      auto& read = held.emplace_back();
      const Py_ssize_t size = PyList_Size(curve.ptr());
      if (size < 0) nb::raise_python_error();
      for (Py_ssize_t i = 0; i < size; ++i) {
        const double survival = PyFloat_AsDouble(PyList_GetItem(curve.ptr(), i));
        if (survival == -1.0 && PyErr_Occurred()) nb::raise_python_error();
        if (survival <= least) break;
        read.push_back(survival);
      }
      read_options.add(read);
    }
    read_options.end_request();
  }
  Plan made = plan(read_options, times, seconds.size(), guard);
  return {std::move(made.picks), made.rate};
}

}  // namespace
}  // namespace dlite

NB_MODULE(_native, module) {
  using namespace dlite;
  nb::class_<Source>(module, "Source")
      .def("extend", &extend, "tokens"_a)
      .def("find", &find, "rule"_a, "max_tokens"_a);
  module.def("step", &step, "sources"_a, "tokens"_a, "rule"_a, "max_tokens"_a);

  nb::class_<AutomatonCursor, Source>(module, "AutomatonCursor")
      .def("reset", &AutomatonCursor::reset);
  nb::class_<Automaton, Source> automaton(module, "Automaton");
  automaton.def(nb::init<int, int>(), "chain_cap"_a = 64, "search_bound"_a = 256)
      .def("freeze", &frozen_arrays)
      .def("cursor", [](nb::object self) {
        auto& index = nb::cast<Automaton&>(self);
        index.check_open();
        return new AutomatonCursor(self, index);
      });
  bind_index(automaton);

  nb::class_<ChainCursor, Source>(module, "ChainCursor").def("reset", &ChainCursor::reset);
  nb::class_<HashChain, Source> chain(module, "HashChain");
  chain
      .def(nb::init<int, int, int>(), "min_match"_a = 3, "max_match"_a = 64, "candidates"_a = 64)
      .def("cursor", [](nb::object self) {
        auto& index = nb::cast<HashChain&>(self);
        index.check_open();
        return new ChainCursor(self, index);
      });
  bind_index(chain);

  nb::class_<FrozenCursor, Source>(module, "FrozenCursor").def("reset", &FrozenCursor::reset);
  nb::class_<HeldFrozen>(module, "Frozen")
      .def("__init__",
           [](HeldFrozen* self, nb::object arrays, int search_bound) {
             new (self) HeldFrozen(hold(std::move(arrays), search_bound));
           },
           "arrays"_a, "search_bound"_a = 256)
      .def("__len__", [](const HeldFrozen& self) { return self.frozen.text_size(); })
      .def("cursor", [](nb::object self) {
        return new FrozenCursor(self, nb::cast<HeldFrozen&>(self).frozen);
      });

  nb::class_<Marks>(module, "Marks")
      .def(nb::init<>())
      .def("mark", &Marks::mark, "start"_a, "value"_a)
      .def("at", &Marks::at, "position"_a)
      .def("cut", &Marks::cut, "size"_a)
      .def("drop", &Marks::drop, "count"_a);
  nb::class_<Prior>(module, "Prior")
      .def(nb::init<Prior::Hazards, std::vector<int>, std::vector<int>, double, double>(),
           "hazards"_a, "match_starts"_a, "position_starts"_a, "weight"_a, "decay"_a);
  nb::class_<Survival>(module, "Survival")
      .def(nb::init<nb::object>(), "prior"_a)
      .def("curve", &curve_of, "evidence"_a, "num_tokens"_a)
      .def("observe", &observe, "evidence"_a, "drafted"_a, "accepted"_a);
  nb::class_<Reader>(module, "Reader")
      .def("__init__",
           [](Reader* self, nb::object tracker) { new (self) Reader(std::move(tracker)); },
           "tracker"_a.none())
      .def_rw("own", &Reader::own)
      .def_rw("seen", &Reader::seen)
      .def_rw("block", &Reader::block)
      .def_rw("label", &Reader::label)
      .def("learn", &Reader::learn, "survival"_a)
      .def("connect", &Reader::connect, "sources"_a, "rules"_a, "names"_a);
  module.def("propose", &propose, "calls"_a, "views"_a, "delta"_a, "threshold"_a, "nothing"_a,
             "seconds"_a = nb::none(), "guard"_a = 0.0);
  module.def("plan", &plan_lists, "options"_a, "seconds"_a, "guard"_a);

  nb::class_<BlockTracker>(module, "BlockTracker")
      .def(nb::init<nb::handle, nb::object>(), "structure"_a, "table"_a)
      .def_prop_ro("pair", &BlockTracker::pair)
      .def_prop_ro("block", &BlockTracker::block)
      .def("feed", &BlockTracker::feed, "tokens"_a)
      .def("feed_bytes",
           [](BlockTracker& self, nb::bytes data) { self.take(data.c_str(), data.size()); },
           "data"_a)
      .def("reset", &BlockTracker::reset)
      .def("cut", &BlockTracker::cut, "tokens"_a)
      .def("copy", [](const BlockTracker& self) { return self; });
}
