// Tokens on their way in from Python, and the locks of a call.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "block_tracker.hpp"
#include "source.hpp"

namespace dlite {

inline void take_token(std::vector<std::int32_t>& out, PyObject* item) {
  const long long token = PyLong_AsLongLong(item);
  if (token == -1 && PyErr_Occurred()) nb::raise_python_error();
  if (token < 0 || token >= INT32_MAX)
    throw std::invalid_argument("token id " + std::to_string(token) +
                                " can't be indexed; give ids in 0 .. 2147483646");
  out.push_back(static_cast<std::int32_t>(token));
}

inline void take_tokens(std::vector<std::int32_t>& out, nb::handle tokens) {
  if (PyList_Check(tokens.ptr())) {
    const Py_ssize_t size = PyList_Size(tokens.ptr());
    for (Py_ssize_t i = 0; i < size; ++i) take_token(out, PyList_GetItem(tokens.ptr(), i));
    return;
  }
  Int32Array array;
  if (nb::try_cast(tokens, array, false)) {
    const std::int32_t* data = array.data();
    for (std::size_t i = 0; i < array.size(); ++i)
      if (data[i] < 0 || data[i] == INT32_MAX)
        throw std::invalid_argument("token id " + std::to_string(data[i]) +
                                    " can't be indexed; give ids in 0 .. 2147483646");
    out.insert(out.end(), data, data + array.size());
    return;
  }
  for (nb::handle token : nb::iter(tokens)) {
    const nb::object number = nb::steal(PyNumber_Index(token.ptr()));
    if (!number.is_valid()) nb::raise_python_error();
    take_token(out, number.ptr());
  }
}

// The locks of all the sources' corpora, each taken once and in one order.
class Locks {
 public:
  explicit Locks(const std::vector<Source*>& sources) {
    for (Source* source : sources) guards_.push_back(&source->guard());
    std::sort(guards_.begin(), guards_.end());
    guards_.erase(std::unique(guards_.begin(), guards_.end()), guards_.end());
    for (std::mutex* guard : guards_) guard->lock();
  }
  ~Locks() {
    for (std::mutex* guard : guards_) guard->unlock();
  }
  Locks(const Locks&) = delete;
  Locks& operator=(const Locks&) = delete;

 private:
  std::vector<std::mutex*> guards_;
};

}  // namespace dlite
