// Memory of one index: grows without leaving copies behind, and can be wiped before it is returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#else
#include <cstdlib>
#endif

namespace dlite {

inline void wipe(void* data, std::size_t bytes) {
  if (bytes == 0) return;
  std::memset(data, 0, bytes);
#if defined(__GNUC__) || defined(__clang__)
  asm volatile("" : : "r"(data) : "memory");  // or the compiler drops a store that nobody reads
#else
  auto* bytes_written = static_cast<volatile unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) bytes_written[i] = 0;
#endif
}

// An array whose new elements are zero. Pages come from the kernel and go back to it.
template <class T>
class Region {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  Region(Region&& other) noexcept { swap(other); }
  Region& operator=(Region&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Region() { release(); }

  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::size_t used_bytes() const { return size_ * sizeof(T); }
  std::size_t allocated_bytes() const { return capacity_ * sizeof(T); }

  void push_back(const T& value) {
    if (size_ == capacity_) reserve(size_ + 1);
    data_[size_++] = value;
  }

  // `count` zeroed elements more; returns the place of the first.
  std::size_t append(std::size_t count) {
    reserve(size_ + count);
    const std::size_t at = size_;
    size_ += count;
    return at;
  }

  void reserve(std::size_t count) {
    if (count <= capacity_) return;
    std::size_t bytes = capacity_ * sizeof(T);
    bytes += bytes / 2;
    if (bytes < count * sizeof(T)) bytes = count * sizeof(T);
    grow(bytes);
    capacity_ = mapped_ / sizeof(T);
  }

  // Zeroes what was written; the memory stays.
  void clear() {
    wipe(data_, used_bytes());
    size_ = 0;
  }

  void release() {
    if (!data_) return;
    clear();
    unmap();
    data_ = nullptr;
    capacity_ = mapped_ = 0;
  }

  void swap(Region& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    std::swap(mapped_, other.mapped_);
  }

 private:
  static constexpr std::size_t kPage = 4096;
#if defined(__linux__)
  // From here on in huge pages: else nearly every step of a pointer chase misses the TLB too.
  static constexpr std::size_t kHugePage = std::size_t{1} << 21;

  void grow(std::size_t bytes) {
    const bool huge = bytes >= kHugePage / 2;
    const bool first = mapped_ == 0;
    const std::size_t wanted = bytes;
    const std::size_t page = huge ? kHugePage : kPage;
    bytes = (bytes + page - 1) / page * page;
    void* fresh = MAP_FAILED;
    if (data_) fresh = mremap(data_, mapped_, bytes, huge ? 0 : MREMAP_MAYMOVE);
    if (fresh == MAP_FAILED) {
      fresh = map(bytes, huge);
      if (data_) move_to(fresh);
    }
    data_ = static_cast<T*>(fresh);
    mapped_ = bytes;
#if defined(MADV_POPULATE_WRITE)
    // One call instead of a fault per page, where it is sure that all pages are wanted: + 17 % for
    // building a hash chain of 64K tokens.
    if (first && wanted >= 16 * kPage && !huge)
      madvise(fresh, wanted / kPage * kPage, MADV_POPULATE_WRITE);
#endif
  }

  static void* map(std::size_t bytes, bool huge) {
    const std::size_t slack = huge ? kHugePage : 0;
    void* mapped = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    if (!huge) return mapped;
    char* begin = static_cast<char*>(mapped);
    const std::size_t skip = (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) %
                             kHugePage;
    if (skip > 0) munmap(begin, skip);
    if (skip < slack) munmap(begin + skip + bytes, slack - skip);
    madvise(begin + skip, bytes, MADV_HUGEPAGE);
    return begin + skip;
  }

  void unmap() { munmap(data_, mapped_); }
#else
  void grow(std::size_t bytes) {
    bytes = (bytes + kPage - 1) / kPage * kPage;
    void* fresh = std::calloc(1, bytes);
    if (!fresh) throw std::bad_alloc();
    if (data_) move_to(fresh);
    data_ = static_cast<T*>(fresh);
    mapped_ = bytes;
  }

  void unmap() { std::free(data_); }
#endif

  void move_to(void* fresh) {
    std::memcpy(fresh, data_, used_bytes());
    wipe(data_, used_bytes());
    unmap();
  }

  T* data_ = nullptr;
  std::size_t size_ = 0, capacity_ = 0, mapped_ = 0;
};

}  // namespace dlite
