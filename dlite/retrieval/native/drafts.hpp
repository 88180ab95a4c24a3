// Objects of dlite/types.py, made without their constructors: these take longer than a search.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>

#include "survival.hpp"

namespace dlite {

namespace nb = nanobind;

// SourceClass of dlite/types.py.
enum SourceClass : int { same_block, other_query, other_block, prompt, workspace, global_corpus };

inline nb::object get(nb::handle of, PyObject* name) {
  nb::object found = nb::steal(PyObject_GetAttr(of.ptr(), name));
  if (!found.is_valid()) nb::raise_python_error();
  return found;
}
inline void set(nb::handle of, PyObject* name, nb::handle value) {
  if (PyObject_GenericSetAttr(of.ptr(), name, value.ptr())) nb::raise_python_error();
}

inline int number(nb::handle of, PyObject* name) {
  const long found = PyLong_AsLong(get(of, name).ptr());
  if (found == -1 && PyErr_Occurred()) nb::raise_python_error();
  return static_cast<int>(found);
}

struct Names {
  PyObject *reader = intern("reader"), *tokens = intern("tokens"), *session = intern("session"),
           *version = intern("version"), *max_draft = intern("max_draft"),
           *source = intern("source"), *evidence = intern("evidence"),
           *survival = intern("survival"), *probs = intern("probs_KV"),
           *confidence = intern("confidence"), *match_length = intern("match_length"),
           *support = intern("support"), *votes = intern("votes"), *agreed = intern("agreed");
  PyObject *draft = type("Draft"), *evidence_type = type("Evidence");
  PyObject* classes[6];
  PyObject *session_name = intern("session"), *global_name = intern("global"),
           *workspace_name = intern("workspace");

  Names() {
    for (int i = 0; i < 6; ++i)
      classes[i] = nb::object(nb::module_::import_("dlite.types").attr("SourceClass")(i))
                       .release().ptr();
  }
  static PyObject* intern(const char* text) { return PyUnicode_InternFromString(text); }
  static PyObject* type(const char* name) {
    return nb::object(nb::module_::import_("dlite.types").attr(name)).release().ptr();
  }
};
inline const Names& names() {
  static const Names all;
  return all;
}

inline nb::object fresh(PyObject* type) {
  nb::object made = nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0));
  if (!made.is_valid()) nb::raise_python_error();
  return made;
}

inline nb::object new_draft(nb::handle tokens, nb::handle survival, nb::handle source,
                            nb::handle evidence) {
  nb::object made = fresh(names().draft);
  set(made, names().tokens, tokens);
  set(made, names().probs, nb::none());
  set(made, names().survival, survival);
  set(made, names().source, source);
  set(made, names().evidence, evidence);
  set(made, names().confidence, nb::none());
  return made;
}

inline nb::object empty(nb::handle source) {
  return new_draft(nb::list(), nb::none(), source, nb::none());
}

template <class Number, class Make> nb::object numbers(const Number* from, int count, Make make) {
  nb::object list = nb::steal(PyList_New(count));
  if (!list.is_valid()) nb::raise_python_error();
  for (int i = 0; i < count; ++i) PyList_SetItem(list.ptr(), i, make(from[i]));
  return list;
}

inline std::size_t cell_of(const Survival& survival, nb::handle evidence) {
  const auto field = [&](PyObject* name) { return number(evidence, name); };
  return survival.prior().cell_of(field(names().source), field(names().match_length),
                                  field(names().support), field(names().votes));
}

inline void observe(Survival& survival, nb::handle evidence, int drafted, int accepted) {
  survival.observe(cell_of(survival, evidence), drafted, accepted);
}

inline nb::object curve_of(Survival& survival, nb::handle evidence, int num_tokens) {
  return numbers(survival.of(cell_of(survival, evidence)).survival.data(),
                 std::min(num_tokens, Curve::kLongest), PyFloat_FromDouble);
}

}  // namespace dlite
