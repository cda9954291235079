// Runs a package of AOTInductor without Python: run_package PACKAGE INPUTS OUTPUTS [FILE PATH
// NAME], where INPUTS and OUTPUTS are torch.save's files of lists of tensors, and FILE is to be
// read where the package names table NAME at PATH. Exits with 1 if an output is another, to the
// last bit.
#include <torch/csrc/api/include/torch/serialize.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

#include "recsdk/serving/torch.h"

namespace {

std::vector<at::Tensor> tensors_of(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<at::Tensor> tensors;
  const at::IValue loaded = torch::pickle_load(bytes);
  for (const at::IValue& each : loaded.toListRef()) {
    tensors.push_back(each.toTensor());
  }
  return tensors;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  const std::vector<at::Tensor> expected = tensors_of(argv[3]);
  recsdk_serving_table* moved = nullptr;
  // File, path, name: a table that lies elsewhere now.
  if (argc == 7 && (recsdk_serving_open(&argv[4], 1, &moved) ||
                    recsdk_serving_torch_use(argv[5], argv[6], moved))) {
    std::cerr << recsdk_serving_last_error_message() << "\n";
    return 3;
  }
  const std::vector<at::Tensor> got = loader.run(tensors_of(argv[2]));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (got.size() != expected.size() || !at::equal(got[i], expected[i])) {
      std::cerr << "output " << i << " differs\n" << got[i] << "\n" << expected[i] << "\n";
      return 1;
    }
  }
  std::cout << got.size() << " outputs are equal\n";
  return 0;
}
