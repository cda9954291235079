// The table of C functions through which a framework exchanges tensors without Python calls.
//
// Source: the DLPack specification, version 1.3, dlpack.h: DLPackExchangeAPI, whose layout is fixed
// for major version 1.
#pragma once

#include <cstdint>

namespace recsdk::bind::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::uint8_t kInt = 0;
inline constexpr std::uint8_t kUint = 1;
inline constexpr std::uint8_t kFloat = 2;

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct DType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t rank;
  DType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: contiguous
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Version version;
  void* context;
  void (*deleter)(ManagedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(Tensor* prototype, ManagedTensor** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*managed_from_object)(void* object, ManagedTensor** out);
  int (*object_from_managed)(ManagedTensor* tensor, void** out);
  int (*view_of_object)(void* object, Tensor* out);  // may be null
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

}  // namespace recsdk::bind::dlpack
