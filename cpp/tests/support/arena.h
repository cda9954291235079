// Arrays that lie over each other by chance, against a count of uses of each byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace recsdk::test {

/// Vectors of floats at equal distances.
struct Vectors {
  float* first;
  std::int64_t count;
};

/// Memory in which arrays lie where chance puts them, with a count of uses of each byte.
class Arena {
 public:
  Arena(std::mt19937_64& random, std::size_t num_words)
      : random_(random), words_(num_words), written_(8 * num_words), read_(8 * num_words) {}

  /// Numbers of 1 to 9, which may be any of keys, times and counts.
  void fill() {
    for (std::int64_t& word : words_) word = 1 + below(9);
  }

  std::int64_t below(std::size_t end) {
    return std::uniform_int_distribution<std::int64_t>(0,
                                                       static_cast<std::int64_t>(end) - 1)(random_);
  }

  template <typename Item>
  std::span<Item> written(std::size_t count) {
    return draw<Item>(count, written_);
  }
  template <typename Item>
  std::span<const Item> read(std::size_t count) {
    return draw<Item>(count, read_);
  }
  /// As many vectors as chance wants and there is room for.
  Vectors vectors_written(std::int64_t width, std::int64_t stride) {
    return draw_vectors(width, stride, written_);
  }
  Vectors vectors_read(std::int64_t width, std::int64_t stride) {
    return draw_vectors(width, stride, read_);
  }
  /// As many as this.
  float* vectors_written(std::int64_t width, std::int64_t stride, std::int64_t count) {
    return place(width, stride, count, written_);
  }
  const float* vectors_read(std::int64_t width, std::int64_t stride, std::int64_t count) {
    return place(width, stride, count, read_);
  }
  /// All of it, as what parts of `written` numbers lie in.
  std::span<std::int32_t> narrow() {
    return {reinterpret_cast<std::int32_t*>(words_.data()), 2 * words_.size()};
  }

  bool has_overlap() const {
    for (std::size_t i = 0; i < written_.size(); ++i) {
      if (written_[i] > 1 || (written_[i] == 1 && read_[i] > 0)) return true;
    }
    return false;
  }
  const std::vector<std::int64_t>& words() const { return words_; }

 private:
  template <typename Item>
  std::span<Item> draw(std::size_t count, std::vector<int>& uses) {
    auto* const items = reinterpret_cast<Item*>(words_.data());
    const std::size_t room = 8 * words_.size() / sizeof(Item) - count;
    const auto begin = static_cast<std::size_t>(below(room + 1));
    for (std::size_t i = begin * sizeof(Item); i < (begin + count) * sizeof(Item); ++i) ++uses[i];
    return {items + begin, count};
  }

  Vectors draw_vectors(std::int64_t width, std::int64_t stride, std::vector<int>& uses) {
    const std::int64_t most = (2 * std::ssize(words_) - width) / stride + 1;
    const std::int64_t count = below(static_cast<std::size_t>(most) + 1);
    return {place(width, stride, count, uses), count};
  }

  float* place(std::int64_t width, std::int64_t stride, std::int64_t count,
               std::vector<int>& uses) {
    auto* const floats = reinterpret_cast<float*>(words_.data());
    if (count == 0) return floats;
    const std::int64_t room = 2 * std::ssize(words_) - (count - 1) * stride - width;
    const std::int64_t begin = below(static_cast<std::size_t>(room) + 1);
    for (std::int64_t i = 0; i < count * width; ++i) {
      const std::int64_t number = begin + i / width * stride + i % width;
      for (std::int64_t byte = 4 * number; byte < 4 * (number + 1); ++byte)
        ++uses[static_cast<std::size_t>(byte)];
    }
    return floats + begin;
  }

  std::mt19937_64& random_;
  std::vector<std::int64_t> words_;
  std::vector<int> written_;  // uses of each byte
  std::vector<int> read_;
};

}  // namespace recsdk::test
