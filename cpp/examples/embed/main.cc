// A logistic model on raw ids: the probability of a click is sigmoid(sum of the weights of a
// sample's ids). Each id's weight is a row of width 1. A sample is a bag of three ids.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "recsdk/recsdk.h"

namespace {

constexpr int kBatch = 256;
constexpr int kIdsPerSample = 3;
constexpr int kSteps = 300;

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

/// Fills a batch; clicks come from hidden weights of the ids, which the model has to find.
void draw(std::mt19937& random, std::vector<recsdk::Key>& keys, std::vector<float>& labels) {
  std::uniform_real_distribution<float> uniform(0.0F, 1.0F);
  for (std::size_t sample = 0; sample < labels.size(); ++sample) {
    float logit = 0.0F;
    for (std::uint64_t field = 0; field < kIdsPerSample; ++field) {
      const std::uint64_t value = random() % 50;
      const std::uint64_t raw_id = (field << 32 | value) * 0x9E3779B97F4A7C15U;  // any 64 bits
      keys[sample * kIdsPerSample + field] = static_cast<recsdk::Key>(raw_id);
      logit += value % 2 == 0 ? 1.5F : -1.5F;
    }
    labels[sample] = uniform(random) < sigmoid(logit) ? 1.0F : 0.0F;
  }
}

/// Saves a table's rows and optimizer state, and fills a new table with them.
recsdk::Table saved_and_loaded(recsdk::Table& table) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), &std::fclose);
  if (file == nullptr) throw std::runtime_error("no temporary file");
  const int descriptor = fileno(file.get());
  recsdk::Cut cut = table.cut({});  // the rows as they are now, though others go on training them
  recsdk::FileSink sink(descriptor, "rows");
  const recsdk::RowFileSummary written = recsdk::write_rows(cut, sink);
  cut.finish(/*durable=*/true);  // after fsync and a rename, where the file is to stay

  recsdk::RowFileReader reader(std::make_shared<recsdk::FileSource>(descriptor, "rows"),
                               written.num_bytes, "rows");
  recsdk::Table loaded(table.config());
  recsdk::Restore restore(loaded);
  restore.add_file(reader);
  restore.commit(cut.update_count());
  return loaded;
}

void run() {
  recsdk::Table table(
      {.dim = 1, .name = "ids", .optimizer = recsdk::OptimizerConfig::adagrad(0.5F)});
  std::mt19937 random(1);
  std::vector<recsdk::Key> keys(kBatch * kIdsPerSample);
  std::vector<recsdk::RowNumber> rows(keys.size());
  std::vector<recsdk::Outcome> outcomes(keys.size());
  std::vector<float> labels(kBatch), logits(kBatch), gradients(kBatch);
  std::vector<std::int64_t> offsets(kBatch + 1);  // of the bags
  for (int bag = 0; bag <= kBatch; ++bag) offsets[bag] = bag * kIdsPerSample;
  for (int step = 0; step < kSteps; ++step) {
    draw(random, keys, labels);
    const recsdk::Lease lease = table.lease(step);  // the batch is in flight until it ends
    table.map(keys, rows, outcomes, {.insert = true, .lease = &lease});
    const recsdk::Bags bags{.rows = rows, .outcomes = outcomes, .offsets = offsets};
    const recsdk::PoolBlock forward{.bags = bags, .out = logits.data(), .stride = 1};
    table.pool({&forward, 1});
    float loss = 0.0F;
    for (int i = 0; i < kBatch; ++i) {
      const float p = sigmoid(logits[i]);
      loss -= std::log(labels[i] > 0.0F ? p : 1.0F - p) / kBatch;
      gradients[i] = (p - labels[i]) / kBatch;
    }
    const recsdk::GradBlock backward{.bags = bags, .grad = gradients.data(), .stride = 1};
    table.update({&backward, 1});
    if (step % 50 == 0 || step + 1 == kSteps)
      std::printf("step %3d  loss %.3f\n", step, static_cast<double>(loss));
  }
  const recsdk::Table loaded = saved_and_loaded(table);
  std::printf("%lld rows, %lld of them loaded\n", static_cast<long long>(table.size()),
              static_cast<long long>(loaded.size()));
}

}  // namespace

int main() {
  try {
    run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "embed: %s\n", error.what());
    return 1;
  }
}
