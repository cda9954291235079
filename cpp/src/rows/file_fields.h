// A table's fields as row files name them.
#pragma once

#include <vector>

#include "recsdk/row_file.h"
#include "recsdk/row_layout.h"

namespace recsdk::internal {

FileField file_field(const RowField& field);
std::vector<FileField> file_fields(const RowLayout& layout);

}  // namespace recsdk::internal
