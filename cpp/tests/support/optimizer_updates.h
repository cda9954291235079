// The table of optimizer updates that every kind of table is tested against:
// data/optimizer_updates.txt. How it is written: tests/support/optimizer_updates.py of the
// repository.
#pragma once

#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/optimizer.h"

namespace recsdk::test {

struct OptimizerUpdate {
  std::uint64_t t = 0;
  float learning_rate = 0.0F;
  double log_decay = 0.0;
  std::vector<float> gradient;                ///< (D,)
  std::vector<std::string> state_fields;      ///< in the order of the state
  std::vector<float> weights, weights_after;  ///< (D,)
  std::vector<float> state, state_after;      ///< (S,)
};

struct OptimizerCase {
  std::string name;
  OptimizerConfig config;
  std::set<std::string> tables;  ///< the kinds of table that have the optimizer
  std::vector<OptimizerUpdate> updates;
};

inline OptimizerKind optimizer_kind(const std::string& name) {
  static const std::map<std::string, OptimizerKind> kinds = {
      {"SGD", OptimizerKind::kSgd},
      {"Adagrad", OptimizerKind::kAdagrad},
      {"RowwiseAdagrad", OptimizerKind::kRowwiseAdagrad},
      {"Adam", OptimizerKind::kAdam},
      {"AdamW", OptimizerKind::kAdam},
      {"PartialRowwiseAdam", OptimizerKind::kPartialRowwiseAdam},
      {"LAMB", OptimizerKind::kLamb},
      {"FTRL", OptimizerKind::kFtrl},
      {"RMSprop", OptimizerKind::kRmsprop}};
  return kinds.at(name);
}

/// `setting`: NAME=VALUE.
inline void set_optimizer(OptimizerConfig& config, const std::string& setting) {
  using Config = OptimizerConfig;
  using Setter = std::function<void(Config&, const std::string&)>;
  const auto number = [](auto member) {
    return Setter([member](Config& c, const std::string& text) {
      c.*member = static_cast<std::remove_reference_t<decltype(c.*member)>>(std::stod(text));
    });
  };
  const auto truth = [](bool Config::* member) {
    return Setter([member](Config& c, const std::string& text) { c.*member = text == "true"; });
  };
  const auto limit = [](std::optional<float> Config::* member) {
    return Setter([member](Config& c, const std::string& text) { c.*member = std::stof(text); });
  };
  static const std::map<std::string, Setter> setters = {
      {"lr", number(&Config::learning_rate)},
      {"eps", number(&Config::eps)},
      {"beta1", number(&Config::beta1)},
      {"beta2", number(&Config::beta2)},
      {"lr_decay", number(&Config::lr_decay)},
      {"initial_accumulator_value", number(&Config::initial_accumulator_value)},
      {"momentum", number(&Config::momentum)},
      {"dampening", number(&Config::dampening)},
      {"nesterov", truth(&Config::nesterov)},
      {"alpha", number(&Config::alpha)},
      {"centered", truth(&Config::centered)},
      {"l1_regularization_strength", number(&Config::l1)},
      {"l2_regularization_strength", number(&Config::l2)},
      {"beta", number(&Config::beta)},
      {"weight_decay", number(&Config::weight_decay)},
      {"catch_up", truth(&Config::catch_up)},
      {"clip_value", limit(&Config::clip_value)},
      {"clip_norm", limit(&Config::clip_norm)},
      {"bias_correction",
       [](Config& c, const std::string& text) {
         c.bias_correction = text == "row" ? BiasCorrection::kRow : BiasCorrection::kTable;
       }},
      {"weight_decay_mode",
       [](Config& c, const std::string& text) {
         c.weight_decay_mode = text == "l2" ? WeightDecay::kL2 : WeightDecay::kDecoupled;
       }},
  };
  const std::size_t equals = setting.find('=');
  setters.at(setting.substr(0, equals))(config, setting.substr(equals + 1));
}

/// `line`: t=NUMBER lr=RATE log_decay=SUM.
inline OptimizerUpdate begin_update(std::istream& line) {
  std::map<std::string, double> numbers;
  for (std::string word; line >> word;) {
    const std::size_t equals = word.find('=');
    numbers[word.substr(0, equals)] = std::stod(word.substr(equals + 1));
  }
  OptimizerUpdate update;
  update.t = static_cast<std::uint64_t>(numbers.at("t"));
  update.learning_rate = static_cast<float>(numbers.at("lr"));
  update.log_decay = numbers.at("log_decay");
  return update;
}

/// `line`: BEFORE ... -> AFTER ...
inline void read_field(const std::string& name, std::istream& line, OptimizerUpdate& update) {
  const bool is_weight = name == "weight";
  if (!is_weight) update.state_fields.push_back(name);
  std::vector<float>* values = is_weight ? &update.weights : &update.state;
  for (std::string word; line >> word;) {
    if (word == "->") {
      values = is_weight ? &update.weights_after : &update.state_after;
    } else {
      values->push_back(std::stof(word));
    }
  }
}

/// The whole table.
inline const std::vector<OptimizerCase>& optimizer_cases() {
  static const std::vector<OptimizerCase> cases = [] {
    std::ifstream file(RECSDK_TESTS_FOLDER "/data/optimizer_updates.txt");
    std::vector<OptimizerCase> found;
    for (std::string text; std::getline(file, text);) {
      std::istringstream line(text);
      std::string word;
      if (!(line >> word) || word[0] == '#') continue;
      if (word == "case") {
        found.emplace_back().name = text.substr(5);
      } else if (word == "optimizer") {
        line >> word;
        found.back().config.kind = optimizer_kind(word);
        while (line >> word) set_optimizer(found.back().config, word);
      } else if (word == "tables") {
        while (line >> word) found.back().tables.insert(word);
      } else if (word == "update") {
        found.back().updates.push_back(begin_update(line));
      } else if (word == "gradient") {
        for (float value = 0.0F; line >> value;)
          found.back().updates.back().gradient.push_back(value);
      } else {
        read_field(word, line, found.back().updates.back());
      }
    }
    if (found.empty()) throw std::runtime_error("no cases in optimizer_updates.txt");
    return found;
  }();
  return cases;
}

}  // namespace recsdk::test
