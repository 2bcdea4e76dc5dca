// A model of `fairlead export --to torchscript` in C++: its outputs, and dy/dx by autograd and by finite differences.
//
//   jacobian MODEL.ts X1 X2 ...
//
// takes one sample in physical units, [features], and prints one JSON document. The model is one of a single input
// [batch, features] and a single output [batch, outputs]; the constants of their normalisation are in the file.
// Exits with 1 if the two derivatives differ.

#include <torch/csrc/autograd/autograd.h>
#include <torch/script.h>

#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace {

using nlohmann::json;
using torch::Tensor;

constexpr double kAllowed = 1e-6; // of the largest derivative, if that is above 1

Tensor tensor_of(const std::vector<double>& values) {
  return torch::tensor(values, torch::kFloat64);
}

std::vector<double> values_of(const Tensor& tensor) {
  const Tensor flat = tensor.detach().contiguous().flatten();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

// The normalised value of an input or output is (physical - mean) / std.
struct Scale {
  Tensor mean = torch::zeros({1}, torch::kFloat64);
  Tensor std = torch::ones({1}, torch::kFloat64);

  Scale(const json& document, const std::string& name) {
    const json constants = document.at("normalization").value(name, json::object());
    if (constants.contains("mean")) mean = tensor_of(constants["mean"].get<std::vector<double>>());
    if (constants.contains("std")) std = tensor_of(constants["std"].get<std::vector<double>>());
  }
};

struct Model {
  explicit Model(const std::string& path) {
    torch::jit::ExtraFilesMap files{{"fairlead.json", ""}};
    module = torch::jit::load(path, torch::kCPU, files);
    document = json::parse(files["fairlead.json"]);
    module.eval();
    module.to(torch::kFloat64); // so that finite differences have digits left
  }

  // Physical units in and out: [features] -> [outputs].
  Tensor operator()(const Tensor& x) {
    const Scale in(document, document["inputs"][0]["name"]), out(document, document["outputs"][0]["name"]);
    const Tensor y = module.forward({((x - in.mean) / in.std).unsqueeze(0)}).toTensor();
    return y[0] * out.std + out.mean;
  }

  torch::jit::Module module;
  json document;
};

// [outputs, features], a backward pass for each output.
Tensor jacobian(Model& model, const Tensor& at) {
  const Tensor x = at.clone().requires_grad_();
  const Tensor y = model(x);
  std::vector<Tensor> rows;
  for (int64_t i = 0; i < y.numel(); ++i) {
    rows.push_back(torch::autograd::grad({y[i]}, {x}, /*grad_outputs=*/{}, /*retain_graph=*/true)[0]);
  }
  return torch::stack(rows);
}

// The same by central differences.
Tensor finite_differences(Model& model, const Tensor& at) {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> columns;
  for (int64_t j = 0; j < at.numel(); ++j) {
    const double step = 1e-5 * std::max(1.0, std::abs(at[j].item<double>()));
    Tensor above = at.clone(), below = at.clone();
    above[j] += step;
    below[j] -= step;
    columns.push_back((model(above) - model(below)) / (2 * step));
  }
  return torch::stack(columns, 1);
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: jacobian MODEL.ts X1 X2 ...\n";
    return 2;
  }
  try {
    Model model(argv[1]);
    std::vector<double> given;
    for (int i = 2; i < argc; ++i) given.push_back(std::stod(argv[i]));
    const json shape = model.document["inputs"][0]["shape"];
    if (shape.size() != 2 || shape[1] != given.size()) {
      std::cerr << "the model takes " << shape << ", and " << given.size() << " numbers were given\n";
      return 2;
    }
    const Tensor x = tensor_of(given);
    const Tensor exact = jacobian(model, x), numeric = finite_differences(model, x);
    const double difference = (exact - numeric).abs().max().item<double>();
    const double scale = std::max(1.0, exact.abs().max().item<double>());
    std::cout << json{{"checkpoint", model.document["checkpoint"]},
                      {"outputs", model.document["outputs"][0]["name"]},
                      {"y", values_of(model(x))},
                      {"dy_dx", values_of(exact)}, // by rows: all of the first output, then the second
                      {"finite_differences", values_of(numeric)},
                      {"difference", difference}}
                     .dump(1)
              << "\n";
    return difference <= kAllowed * scale ? 0 : 1;
  } catch (const std::exception& error) { // of torch, of the JSON, of a number
    std::cerr << "error: " << error.what() << "\n";
    return 2;
  }
}
