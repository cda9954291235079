// A table's fields as row files name them.
#pragma once

#include <vector>

#include "recsdk/row_file.h"
#include "recsdk/row_layout.h"

namespace recsdk::internal {

/// The name, element type and count of a field. Throws std::invalid_argument for an unknown type.
FileField file_field(const RowField& field);
/// Those of all fields, in the order of the layout.
std::vector<FileField> file_fields(const RowLayout& layout);

}  // namespace recsdk::internal
