#include "rows/file_fields.h"

#include <stdexcept>

namespace recsdk::internal {
namespace {

FieldType file_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return FieldType::kFloat32;
    case DType::kBFloat16:
      return FieldType::kBfloat16;
    case DType::kFloat16:
      return FieldType::kFloat16;
  }
  throw std::invalid_argument("unknown type of a field");
}

}  // namespace

FileField file_field(const RowField& field) {
  return {field.name, file_type(field.dtype), field.count};
}

std::vector<FileField> file_fields(const RowLayout& layout) {
  std::vector<FileField> fields;
  fields.reserve(layout.fields.size());
  for (const RowField& field : layout.fields) fields.push_back(file_field(field));
  return fields;
}

}  // namespace recsdk::internal
