#include "frozen_place.h"

#include <algorithm>
#include <boost/json/src.hpp>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <stdexcept>

#include "manifest_text.h"

namespace recsdk::serving_torch {
namespace {

namespace json = boost::json;

constexpr std::int64_t kVersion = 1;
constexpr std::size_t kTokenLength = 32;

json::value parsed(std::string_view text, const std::string& where) {
  boost::system::error_code error;
  json::value value = json::parse(text, error);
  if (error) throw std::runtime_error(where + ": is no JSON: " + error.message());
  return value;
}

const json::value& field(const json::value& object, const char* name, const std::string& where) {
  const json::object* const fields = object.if_object();
  const json::value* const value = fields == nullptr ? nullptr : fields->if_contains(name);
  if (value == nullptr) throw std::runtime_error(where + ": has no '" + name + "'");
  return *value;
}

std::string text_field(const json::value& object, const char* name, const std::string& where) {
  const json::value& value = field(object, name, where);
  if (!value.is_string()) throw std::runtime_error(where + ": '" + name + "' is no text");
  return json::value_to<std::string>(value);
}

const json::array& list_field(const json::value& object, const char* name,
                              const std::string& where) {
  const json::value& value = field(object, name, where);
  if (!value.is_array()) throw std::runtime_error(where + ": '" + name + "' is no list");
  return value.get_array();
}

json::value parse_manifest(std::string_view text, const std::string& path) {
  json::value manifest = parsed(text, path);
  const json::value& version = field(manifest, "version", path);
  if (text_field(manifest, "format", path) != "recsdk-frozen" || !version.is_int64() ||
      version.get_int64() != kVersion) {
    throw std::runtime_error(path + ": is no manifest of frozen tables of version 1");
  }
  return manifest;
}

/// The folder of the files: 128 random bits in hexadecimal, so no path leads out of it.
std::string token_of(const json::value& manifest, const std::string& where) {
  std::string token = text_field(manifest, "token", where);
  const auto is_hex = [](char c) { return ('0' <= c && c <= '9') || ('a' <= c && c <= 'f'); };
  if (token.size() != kTokenLength || !std::ranges::all_of(token, is_hex)) {
    throw std::runtime_error(where + ": its token is damaged");
  }
  return token;
}

std::string manifest_at(const Place& place) { return place.path + "/manifest.json"; }

std::string file_of(const std::string& folder, std::size_t table, std::int64_t shard) {
  char name[64];
  std::snprintf(name, sizeof(name), "/tables/%04zu/shard_%05lld.frozen", table,
                static_cast<long long>(shard));
  return folder + name;
}

[[noreturn]] void throw_twice(const std::string& where, const std::string& name) {
  throw std::runtime_error(where + ": names table '" + name + "' twice");
}

}  // namespace

Place parse_place(std::string_view text) {
  const std::string where = "the place of a frozen table, " + std::string(text);
  const json::value value = parsed(text, where);
  const json::array* const parts = value.if_array();
  // Process, number, path, name, shards, token.
  if (parts == nullptr || parts->size() != 6 || !parts->at(2).is_string() ||
      !parts->at(3).is_string()) {
    throw std::runtime_error(where + ": was not exported by this version of recsdk-core");
  }
  // Of a path with a zero in it another file would be opened.
  if (parts->at(2).get_string().find('\0') != json::string::npos)
    throw std::runtime_error(where + ": its path has a byte of zeros");
  Place place{json::value_to<std::string>(parts->at(2)),
              json::value_to<std::string>(parts->at(3)),
              std::nullopt,
              {}};
  if (!parts->at(4).is_null()) {
    place.shards = json::value_to<std::vector<std::int64_t>>(parts->at(4));
  }
  place.group =
      json::serialize(json::array{parts->at(0), parts->at(2), parts->at(4), parts->at(5)});
  return place;
}

Frozen parse_frozen(std::string_view text, const Place& place) {
  const std::string where = manifest_at(place);
  const json::value manifest = parse_manifest(text, where);
  const json::array& tables = list_field(manifest, "tables", where);
  Frozen frozen{token_of(manifest, where), {}};
  const std::string folder = place.path + "/" + frozen.token;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const std::string name = text_field(tables[t], "name", where);
    const auto count = static_cast<std::int64_t>(list_field(tables[t], "files", where).size());
    if (frozen.files.contains(name)) throw_twice(where, name);
    std::vector<std::string>& files = frozen.files[name];
    for (std::int64_t shard = 0; shard < count; ++shard) {
      const bool is_open = !place.shards || std::ranges::count(*place.shards, shard) > 0;
      if (is_open) files.push_back(file_of(folder, t, shard));
    }
    if (place.shards && files.size() != place.shards->size()) {
      std::string message = where;
      message += ": table '" + name + "' has " + std::to_string(count);
      throw std::runtime_error(message + " shards, others were exported");
    }
  }
  return frozen;
}

Frozen read_frozen(const Place& place) {
  return parse_frozen(manifest_text(manifest_at(place)), place);
}

}  // namespace recsdk::serving_torch
