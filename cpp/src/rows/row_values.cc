#include "rows/row_values.h"

#include <algorithm>
#include <cstdint>

#include "kernels/half.h"

namespace recsdk::internal {
namespace {

float* floats_of(const RowAddresses& addresses, const RowField& field, std::int64_t row) {
  return reinterpret_cast<float*>(field_address(addresses, field, row));
}

std::uint16_t* halves_of(const RowAddresses& addresses, const RowField& field, std::int64_t row) {
  return reinterpret_cast<std::uint16_t*>(field_address(addresses, field, row));
}

}  // namespace

std::byte* field_address(const RowAddresses& addresses, const RowField& field, std::int64_t row) {
  std::byte* const start =
      field.place == FieldPlace::kScalars ? addresses.scalars(row) : addresses.record(row);
  return start + field.offset;
}

void read_weights(const RowLayout& layout, const RowAddresses& addresses, std::int64_t row,
                  float* weights) {
  const RowField& field = layout.fields[0];
  if (field.dtype == DType::kFloat32) {
    std::copy_n(floats_of(addresses, field, row), layout.dim, weights);
    return;
  }
  const std::uint16_t* const halves = halves_of(addresses, field, row);
  std::transform(halves, halves + layout.dim, weights,
                 [&](std::uint16_t half) { return widen(field.dtype, half); });
}

void write_weights(const RowLayout& layout, const RowAddresses& addresses, std::int64_t row,
                   const float* weights) {
  const RowField& field = layout.fields[0];
  if (field.dtype == DType::kFloat32) {
    std::copy_n(weights, layout.dim, floats_of(addresses, field, row));
    return;
  }
  std::transform(weights, weights + layout.dim, halves_of(addresses, field, row),
                 [&](float x) { return nearest(field.dtype, x); });
}

void read_state(const RowLayout& layout, const RowAddresses& addresses, std::int64_t row,
                float* state) {
  for (std::size_t f = 1; f < layout.fields.size(); ++f) {
    const RowField& field = layout.fields[f];
    state = std::copy_n(floats_of(addresses, field, row), field.count, state);
  }
}

void write_state(const RowLayout& layout, const RowAddresses& addresses, std::int64_t row,
                 const float* state) {
  for (std::size_t f = 1; f < layout.fields.size(); ++f) {
    const RowField& field = layout.fields[f];
    std::copy_n(state, field.count, floats_of(addresses, field, row));
    state += field.count;
  }
}

void reset_state(const RowLayout& layout, const RowAddresses& addresses, std::int64_t row) {
  for (std::size_t f = 1; f < layout.fields.size(); ++f) {
    const RowField& field = layout.fields[f];
    std::fill_n(floats_of(addresses, field, row), field.count, field.initial_value);
  }
}

}  // namespace recsdk::internal
