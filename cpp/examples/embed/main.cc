// A logistic model on raw ids: the probability of a click is sigmoid(sum of the weights of a
// sample's ids).
//
// Each id's weight is a row of width 1. A sample is a bag of three ids: a user, an item, a day.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include "recsdk/recsdk.h"

namespace {

constexpr int kBatch = 256;
constexpr int kIdsPerSample = 3;
constexpr int kSteps = 300;

struct Batch {
  std::vector<recsdk::Key> keys;         // (B * 3,)
  std::vector<std::int64_t> offsets{0};  // (B + 1,)
  std::vector<float> labels;             // (B,)
};

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

/// A raw id can be any 64-bit number; here there is one for each value of each field.
recsdk::Key raw_id(std::uint64_t field, std::uint64_t value) {
  return static_cast<recsdk::Key>((field << 32 | value) * 0x9E3779B97F4A7C15U);
}

/// Clicks come from hidden weights of the ids, which the model has to find.
Batch make_batch(std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(0.0F, 1.0F);
  Batch batch;
  for (int sample = 0; sample < kBatch; ++sample) {
    float logit = 0.0F;
    for (std::uint64_t field = 0; field < kIdsPerSample; ++field) {
      const std::uint64_t value = random() % 50;
      batch.keys.push_back(raw_id(field, value));
      logit += value % 2 == 0 ? 1.5F : -1.5F;
    }
    batch.offsets.push_back(static_cast<std::int64_t>(batch.keys.size()));
    batch.labels.push_back(uniform(random) < sigmoid(logit) ? 1.0F : 0.0F);
  }
  return batch;
}

/// Writes d loss / d logit of each sample; returns the mean log loss.
float log_loss(const std::vector<float>& logits, const std::vector<float>& labels,
               std::vector<float>& gradients) {
  float loss = 0.0F;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const float p = sigmoid(logits[i]);
    loss -= std::log(labels[i] > 0.0F ? p : 1.0F - p) / kBatch;
    gradients[i] = (p - labels[i]) / kBatch;
  }
  return loss;
}

float train(recsdk::Table& table, std::int64_t step, const Batch& batch) {
  std::vector<recsdk::RowNumber> rows(batch.keys.size());
  std::vector<recsdk::Outcome> outcomes(batch.keys.size());
  std::vector<float> logits(kBatch);
  std::vector<float> gradients(kBatch);

  const recsdk::Lease lease =
      table.lease(step);  // the batch is in flight until the end of this function
  table.map(batch.keys, rows, outcomes, {.insert = true, .lease = &lease});
  const recsdk::Bags bags{
      .rows = rows, .outcomes = outcomes, .offsets = batch.offsets, .weights = {}};

  const recsdk::PoolBlock forward{.bags = bags, .out = logits.data(), .stride = 1};
  table.pool({&forward, 1});
  const float loss = log_loss(logits, batch.labels, gradients);
  const recsdk::GradBlock backward{.bags = bags, .grad = gradients.data(), .stride = 1};
  table.update({&backward, 1});
  return loss;
}

int run() {
  recsdk::TableConfig config;
  config.dim = 1;
  config.name = "ids";
  config.optimizer = recsdk::OptimizerConfig::adagrad(0.5F);
  recsdk::Table table(config);
  std::mt19937 random(1);
  float first = 0.0F;
  float recent = 0.0F;
  for (int step = 0; step < kSteps; ++step) {
    const float loss = train(table, step, make_batch(random));
    if (step == 0) first = recent = loss;
    recent += 0.1F * (loss - recent);
    if (step % 50 == 0 || step == kSteps - 1)
      std::printf("step %3d  loss %.3f\n", step, static_cast<double>(recent));
  }
  std::printf("%lld rows, %s kernels\n", static_cast<long long>(table.size()),
              recsdk::isa().c_str());
  return recent < 0.75F * first ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "embed: %s\n", error.what());
    return 1;
  }
}
