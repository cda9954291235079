#include "recsdk/vectors.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/runtime.h"
#include "util/thread_pool.h"

namespace recsdk {
namespace {

std::int64_t row_of(const PackedPart& part, std::int64_t i) {
  return part.rows == nullptr ? i : part.rows[i];
}

std::string number(std::int64_t value) { return std::to_string(value); }

template <typename Block>
void check_part(const Block& block, const PackedPart& part, std::size_t packed_size) {
  if (part.num_rows < 0 || (part.rows == nullptr && part.num_rows != block.num_rows)) {
    throw std::invalid_argument("a packed part has " + number(part.num_rows) +
                                " vectors for all rows of a block of " + number(block.num_rows) +
                                "; give one for each row, or say which rows");
  }
  const auto size = static_cast<std::int64_t>(packed_size);
  if (part.start < 0 || part.start > size ||
      (block.width > 0 && part.num_rows > (size - part.start) / block.width)) {
    throw std::invalid_argument("a packed part of " + number(part.num_rows) + " vectors of width " +
                                number(block.width) + " from " + number(part.start) +
                                " on does not fit into " + number(size) + " floats");
  }
  if (part.rows == nullptr) return;
  std::int32_t low = 0;
  std::int32_t high = -1;
  for (std::int64_t i = 0; i < part.num_rows; ++i) {
    low = std::min(low, part.rows[i]);
    high = std::max(high, part.rows[i]);
  }
  if (low < 0 || high >= block.num_rows) {
    throw std::invalid_argument("a packed part has row " + number(low < 0 ? low : high) +
                                " of a block of " + number(block.num_rows) + " rows");
  }
}

template <typename Block>
void check(std::span<const Block> blocks, std::size_t packed_size, bool may_repeat) {
  for (const Block& block : blocks) {
    const bool is_sound = block.width >= 0 && block.num_rows >= 0 &&
                          (block.stride >= block.width || (may_repeat && block.stride == 0));
    if (!is_sound) {
      throw std::invalid_argument("a block of vectors has " + number(block.num_rows) +
                                  " rows of width " + number(block.width) + ", " +
                                  number(block.stride) + " apart");
    }
    for (const PackedPart& part : block.parts) check_part(block, part, packed_size);
  }
}

void copy(const float* from, float* to, std::int64_t width) {
  std::memcpy(to, from, static_cast<std::size_t>(width) * sizeof(float));
}

void add(const float* __restrict from, float* __restrict to, std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) to[i] += from[i];
}

void divide(const float* __restrict from, float divisor, float* __restrict to, std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) to[i] = from[i] / divisor;
}

// `is_written` says of each row whether it has had a vector; none has.
void unpack(const float* packed, const UnpackBlock& block, std::vector<std::uint8_t>& is_written) {
  const std::int64_t width = block.width;
  std::int64_t num_written = 0;
  for (const PackedPart& part : block.parts) {
    const float* from = packed + part.start;
    for (std::int64_t i = 0; i < part.num_rows; ++i, from += width) {
      const std::int64_t row = row_of(part, i);
      float* const to = block.to + row * block.stride;
      std::uint8_t& was_written = is_written[static_cast<std::size_t>(row)];
      if (was_written != 0) {
        add(from, to, width);
      } else {
        copy(from, to, width);
        was_written = 1;
        ++num_written;
      }
    }
  }
  if (num_written == block.num_rows) return;
  for (std::int64_t row = 0; row < block.num_rows; ++row) {
    if (is_written[static_cast<std::size_t>(row)] == 0)
      std::fill_n(block.to + row * block.stride, width, 0.0F);
  }
}

void pack(const PackBlock& block, float divisor, float* packed) {
  for (const PackedPart& part : block.parts) {
    float* to = packed + part.start;
    for (std::int64_t i = 0; i < part.num_rows; ++i, to += block.width) {
      const float* const from = block.from + row_of(part, i) * block.stride;
      if (divisor == 1.0F)
        copy(from, to, block.width);
      else
        divide(from, divisor, to, block.width);
    }
  }
}

constexpr std::int64_t kMostProcesses = 65'536;

[[noreturn, gnu::cold]] void refuse_stretches(const char* what) {
  throw std::invalid_argument(std::string("stretches of vectors: ") + what);
}

void check_stretches(const VectorStretches& stretches, std::int64_t num_processes,
                     std::int64_t multiple, std::size_t num_starts) {
  const std::size_t size = stretches.counts.size();
  if (stretches.widths.size() != size || stretches.processes.size() != size || num_starts != size)
    refuse_stretches("each must have a count, a width, a process and room for its start");
  if (multiple < 1) refuse_stretches("the multiple must be 1 or more");
  if (num_processes < 0) refuse_stretches("there is no negative number of processes");
  if (num_processes > kMostProcesses) refuse_stretches("there are at most 65,536 processes");
}

/// a + b * c, none of them negative.
std::int64_t sum_of(std::int64_t a, std::int64_t b, std::int64_t c) {
  std::int64_t product = 0;
  std::int64_t sum = 0;
  if (__builtin_mul_overflow(b, c, &product) || __builtin_add_overflow(a, product, &sum))
    refuse_stretches("there are more than 2**63 floats");
  return sum;
}

}  // namespace

SentFloats lay_out_vectors(std::span<const std::int64_t> counts, const VectorStretches& stretches,
                           std::int64_t num_processes, std::int64_t multiple,
                           std::span<std::int64_t> starts) {
  check_stretches(stretches, num_processes, multiple, starts.size());
  const auto num_counts = static_cast<std::int64_t>(counts.size());
  SentFloats sent;
  std::int64_t begin = 0;
  std::size_t i = 0;
  for (std::int64_t process = 0; process < num_processes; ++process) {
    std::int64_t end = begin;
    for (; i < starts.size() && stretches.processes[i] == process; ++i) {
      const std::int64_t which = stretches.counts[i];
      if (which < 0 || which >= num_counts) refuse_stretches("a count is not there");
      const std::int64_t count = counts[static_cast<std::size_t>(which)];
      if (count < 0 || stretches.widths[i] < 0) refuse_stretches("no number may be negative");
      starts[i] = end;
      end = sum_of(end, count, stretches.widths[i]);
    }
    const std::int64_t used = end - begin;
    const std::int64_t num_multiples = used / multiple + (used % multiple != 0 ? 1 : 0);
    sent.used.push_back(used);
    sent.padded.push_back(sum_of(0, num_multiples, multiple));
    begin = sum_of(begin, sent.padded.back(), 1);
  }
  if (i != starts.size()) refuse_stretches("their processes must ascend, and be there");
  return sent;
}

void unpack_vectors(std::span<const float> packed, std::span<const UnpackBlock> blocks) {
  check(blocks, packed.size(), false);
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::uint8_t> is_written;
    for (std::int64_t i = begin; i < end; ++i) {
      const UnpackBlock& block = blocks[static_cast<std::size_t>(i)];
      if (block.width == 0) continue;
      is_written.assign(static_cast<std::size_t>(block.num_rows), 0);
      unpack(packed.data(), block, is_written);
    }
  };
  internal::parallel_for(static_cast<std::int64_t>(blocks.size()), 1, num_threads(), run);
}

void pack_vectors(std::span<const PackBlock> blocks, float divisor, std::span<float> packed) {
  check(blocks, packed.size(), true);
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      pack(blocks[static_cast<std::size_t>(i)], divisor, packed.data());
  };
  internal::parallel_for(static_cast<std::int64_t>(blocks.size()), 1, num_threads(), run);
}

}  // namespace recsdk
