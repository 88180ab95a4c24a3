// The states of a suffix automaton and their edges.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "region.hpp"

namespace dlite {

// One edge lies in the state. More lie in a block of the pool, in order of insertion: `capacity`
// tokens, as many targets, and from kIndexed on a hash table of twice as many places.
struct State {
  std::int32_t length, link, first, last, count, num_edges;
  std::int32_t token;   // of the only edge
  std::uint32_t place;  // its target, or the block
};
static_assert(sizeof(State) == 32);

class EdgePool {
 public:
  static std::uint32_t capacity(std::int32_t num_edges) {
    return std::bit_ceil(static_cast<std::uint32_t>(num_edges));
  }

  const std::int32_t* block(const State& state) const { return pool_.data() + state.place; }

  // Where the target of an edge stands, or null.
  std::int32_t* target(State& state, std::int32_t token) {
    if (state.num_edges <= 1) {
      const bool found = state.num_edges == 1 && state.token == token;
      return found ? reinterpret_cast<std::int32_t*>(&state.place) : nullptr;
    }
    const std::uint32_t size = capacity(state.num_edges);
    std::int32_t* tokens = pool_.data() + state.place;
    if (size < kIndexed) {
      for (std::int32_t i = 0; i < state.num_edges; ++i)
        if (tokens[i] == token) return tokens + size + i;
      return nullptr;
    }
    const std::int32_t* index = tokens + 2 * size;
    for (std::uint32_t at = home(token, size); index[at]; at = (at + 1) & (2 * size - 1)) {
      const std::int32_t edge = index[at] - 1;
      if (tokens[edge] == token) return tokens + size + edge;
    }
    return nullptr;
  }

  // What `target` and `insert` look at first.
  void prefetch(const State& state, std::int32_t token) const {
    const std::uint32_t size = capacity(state.num_edges);
    const std::int32_t* tokens = block(state);
    if (size >= kIndexed) __builtin_prefetch(tokens + 2 * size + home(token, size), 1);
    __builtin_prefetch(tokens);
    __builtin_prefetch(tokens + state.num_edges, 1);
    __builtin_prefetch(tokens + size + state.num_edges, 1);
  }

  void insert(State& state, std::int32_t token, std::int32_t target) {
    const std::int32_t count = state.num_edges++;
    if (count == 0) {
      state.token = token;
      state.place = static_cast<std::uint32_t>(target);
      return;
    }
    if (std::has_single_bit(static_cast<std::uint32_t>(count))) widen(state, count);
    const std::uint32_t size = capacity(count + 1);
    std::int32_t* tokens = pool_.data() + state.place;
    tokens[count] = token;
    tokens[size + static_cast<std::uint32_t>(count)] = target;
    if (size >= kIndexed) enter(tokens, size, count);
  }

  void copy(State& state) {
    if (state.num_edges <= 1) return;
    const std::uint32_t size = capacity(state.num_edges);
    const std::uint32_t fresh = allocate(size);
    std::memcpy(pool_.data() + fresh, pool_.data() + state.place, ints(size) * 4);
    state.place = fresh;
  }

  Region<std::int32_t>& memory() { return pool_; }
  const Region<std::int32_t>& memory() const { return pool_; }

 private:
  static constexpr std::uint32_t kIndexed = 16;

  static std::size_t ints(std::uint32_t size) { return size < kIndexed ? 2 * size : 4 * size; }

  static std::uint32_t home(std::int32_t token, std::uint32_t size) {
    const std::uint32_t mixed = static_cast<std::uint32_t>(token) * 0x9E3779B1u;
    return mixed >> (32 - std::countr_zero(2 * size));
  }

  static void enter(std::int32_t* tokens, std::uint32_t size, std::int32_t edge) {
    std::int32_t* index = tokens + 2 * size;
    std::uint32_t at = home(tokens[edge], size);
    while (index[at]) at = (at + 1) & (2 * size - 1);
    index[at] = edge + 1;
  }

  void widen(State& state, std::int32_t count) {
    const std::uint32_t size = static_cast<std::uint32_t>(count), wider = 2 * size;
    const std::uint32_t fresh = allocate(wider);
    std::int32_t* to = pool_.data() + fresh;
    if (count == 1) {
      to[0] = state.token;
      to[wider] = static_cast<std::int32_t>(state.place);
    } else {
      std::int32_t* from = pool_.data() + state.place;
      std::memcpy(to, from, size * 4);
      std::memcpy(to + wider, from + size, size * 4);
      std::int32_t& free = free_[std::countr_zero(size)];
      std::memset(from, 0, ints(size) * 4);
      from[0] = free;
      free = static_cast<std::int32_t>(state.place) + 1;
    }
    if (wider >= kIndexed)
      for (std::int32_t edge = 0; edge < count; ++edge) enter(to, wider, edge);
    state.place = fresh;
  }

  std::uint32_t allocate(std::uint32_t size) {
    std::int32_t& free = free_[std::countr_zero(size)];
    if (free) {
      const std::uint32_t place = static_cast<std::uint32_t>(free) - 1;
      free = pool_[place];
      pool_[place] = 0;
      return place;
    }
    return static_cast<std::uint32_t>(pool_.append(ints(size)));
  }

  Region<std::int32_t> pool_;
  std::int32_t free_[32] = {};  // per size: the place of the first free block, plus one
};

}  // namespace dlite
