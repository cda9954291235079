// strings.h: keys from strings.
#include <cstdint>

#include "arguments/array.h"
#include "arguments/checked.h"
#include "arguments/gil.h"
#include "arguments/results.h"
#include "bindings.h"
#include "recsdk/strings.h"

namespace recsdk::bind {
namespace {

nb::object hash(nb::handle bytes_object, nb::handle offsets_object, std::uint64_t seed) {
  const Array text = bytes(bytes_object, "bytes");
  const Integers offsets(offsets_object, "offsets");
  if (offsets.span().empty())
    throw nb::value_error("offsets must have one element more than there are strings, got none");
  const std::size_t num_keys = offsets.span().size() - 1;
  Result keys = make_rows(offsets.framework(), static_cast<std::int64_t>(num_keys));
  {
    const WithoutGil without_gil;
    hash_strings(
        {static_cast<const std::uint8_t*>(text.data), static_cast<std::size_t>(text.shape[0])},
        offsets.span(), seed, row_span(keys, num_keys));
  }
  return std::move(keys.object);
}

}  // namespace

void bind_strings(nb::module_& module) {
  module.def("hash_strings", &hash, nb::arg("bytes").none(), nb::arg("offsets").none(),
             nb::arg("seed"));
}

}  // namespace recsdk::bind
