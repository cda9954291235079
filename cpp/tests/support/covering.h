// Few combinations of settings that have every two values of different settings together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

namespace recsdk::test {

/// Of each setting the number of its value; absent: not chosen yet.
using Choices = std::vector<std::optional<std::size_t>>;
/// Whether values of some or all settings go together; one that knows too few says yes.
using Rule = std::function<bool(const Choices&)>;

/// Greedy: a combination starts from a pair that none has yet, and takes of each further setting
/// the value that adds most such pairs, or the rarest so far of those that do.
class Covering {
 public:
  /// `sizes` has the number of values of each setting.
  Covering(const std::vector<std::size_t>& sizes, Rule is_legal)
      : sizes_(sizes), is_legal_(std::move(is_legal)) {
    for (std::size_t a = 0; a < sizes.size(); ++a) {
      for (std::size_t b = a + 1; b < sizes.size(); ++b) add_pairs(a, b);
    }
  }

  /// Combinations of all settings: each legal pair of values is in one of them at least. Throws
  /// std::logic_error if a pair is in no legal combination. Once.
  std::vector<Choices> combinations() {
    std::vector<Choices> found;
    while (!missing_.empty()) {
      const auto [one, other] = *missing_.begin();
      Choices row(sizes_.size());
      row[one.first] = one.second;
      row[other.first] = other.second;
      if (!complete(row, 0)) throw std::logic_error("a pair of values is in no combination");
      note(row);
      found.push_back(std::move(row));
    }
    return found;
  }

 private:
  using Choice = std::pair<std::size_t, std::size_t>;  // a setting and its value

  void add_pairs(std::size_t a, std::size_t b) {
    for (std::size_t i = 0; i < sizes_[a]; ++i) {
      for (std::size_t j = 0; j < sizes_[b]; ++j) {
        Choices pair(sizes_.size());
        pair[a] = i;
        pair[b] = j;
        if (is_legal_(pair)) missing_.emplace(Choice{a, i}, Choice{b, j});
      }
    }
  }

  bool complete(Choices& row, std::size_t setting) {
    while (setting < row.size() && row[setting]) ++setting;
    if (setting == row.size()) return is_legal_(row);
    std::vector<std::pair<std::pair<std::ptrdiff_t, std::size_t>, std::size_t>> ranked;
    for (std::size_t value = 0; value < sizes_[setting]; ++value)
      ranked.push_back({{-gain(row, {setting, value}), uses_[{setting, value}]}, value});
    std::sort(ranked.begin(), ranked.end());
    for (const auto& [rank, value] : ranked) {
      row[setting] = value;
      if (is_legal_(row) && complete(row, setting + 1)) return true;
    }
    row[setting].reset();
    return false;
  }

  std::ptrdiff_t gain(const Choices& row, Choice added) const {
    std::ptrdiff_t count = 0;
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row[i]) count += missing_.contains(std::minmax(added, Choice{i, *row[i]})) ? 1 : 0;
    }
    return count;
  }

  void note(const Choices& row) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      ++uses_[{i, *row[i]}];
      for (std::size_t j = i + 1; j < row.size(); ++j)
        missing_.erase({Choice{i, *row[i]}, Choice{j, *row[j]}});
    }
  }

  std::vector<std::size_t> sizes_;
  Rule is_legal_;
  std::set<std::pair<Choice, Choice>> missing_;
  std::map<Choice, std::size_t> uses_;
};

}  // namespace recsdk::test
