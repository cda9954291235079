#include "manifest_text.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>

namespace recsdk::serving_torch {

std::string manifest_text(const std::string& path) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (!error && size > kMostManifestBytes) {
    throw std::runtime_error(path + ": has " + std::to_string(size) +
                             " bytes, more than a manifest may");
  }
  std::ifstream file;
  if (!error) file.open(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (error || !file) {
    throw std::runtime_error(path + ": cannot be read; is it a frozen checkpoint?");
  }
  return text;
}

}  // namespace recsdk::serving_torch
