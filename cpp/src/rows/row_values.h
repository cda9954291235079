// The values of single rows, in and out of the places that a layout gives them.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "recsdk/row_layout.h"

namespace recsdk::internal {

/// Address of the first element of a field in row `row`.
std::byte* field_address(const RowAddresses& addresses, const RowField& field, std::int64_t row);

/// Copies a row's D weights; 16-bit ones are widened when read, and rounded to the nearest when
/// written.
void read_weights(const RowLayout& layout, const RowAddresses& addresses, std::int64_t row,
                  float* weights);
void write_weights(const RowLayout& layout, const RowAddresses& addresses, std::int64_t row,
                   const float* weights);

/// Copies a row's S numbers of state, field after field.
void read_state(const RowLayout& layout, const RowAddresses& addresses, std::int64_t row,
                float* state);
void write_state(const RowLayout& layout, const RowAddresses& addresses, std::int64_t row,
                 const float* state);

/// Gives a row the state of a new one.
void reset_state(const RowLayout& layout, const RowAddresses& addresses, std::int64_t row);

}  // namespace recsdk::internal
