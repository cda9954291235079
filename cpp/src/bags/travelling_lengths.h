// Lengths of bags as they travel between processes: 1, 2, 4 or 8 bytes each, side by side in words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace recsdk::internal {

inline constexpr std::int64_t kWordBytes = 8;

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// How many words `count` lengths take.
inline std::int64_t words_of_lengths(std::int64_t count, std::int64_t bytes) {
  const std::int64_t of_word = kWordBytes / bytes;
  return (count / of_word) + static_cast<std::int64_t>(count % of_word != 0);
}

/// Calls use(Length{}) for the type of lengths that take so many bytes.
template <typename Use>
auto with_length(std::int64_t bytes, const Use& use) {
  switch (bytes) {
    case 1:
      return use(std::uint8_t{});
    case 2:
      return use(std::uint16_t{});
    case 4:
      return use(std::uint32_t{});
    default:
      return use(std::uint64_t{});
  }
}

/// Lengths that lie in words.
template <typename Length>
class Lengths {
 public:
  explicit Lengths(const std::int64_t* words) : bytes_(reinterpret_cast<const char*>(words)) {}

  Length operator[](std::int64_t i) const {
    Length length;
    std::memcpy(&length, bytes_ + i * static_cast<std::int64_t>(sizeof(Length)), sizeof(Length));
    return length;
  }

 private:
  const char* bytes_;
};

/// The same, to be written.
template <typename Length>
class WrittenLengths {
 public:
  explicit WrittenLengths(std::int64_t* words) : bytes_(reinterpret_cast<char*>(words)) {}

  void clear(std::int64_t begin, std::int64_t end) const {
    std::memset(place(begin), 0, at(end - begin) * sizeof(Length));
  }

  void set(std::int64_t i, Length length) const { std::memcpy(place(i), &length, sizeof(Length)); }

  void increment(std::int64_t i) const {
    Length length;
    std::memcpy(&length, place(i), sizeof(Length));
    set(i, static_cast<Length>(length + 1));
  }

 private:
  char* place(std::int64_t i) const {
    return bytes_ + i * static_cast<std::int64_t>(sizeof(Length));
  }

  char* bytes_;
};

}  // namespace recsdk::internal
