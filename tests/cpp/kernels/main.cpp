// The CUDA copy kernels without torch: correctness and speed.
//
//   copy_kernels values [CASES] | many | large [LOG2] | mean | bandwidth [MIB] | latency [ROUNDS]
//                [--json FILE] [--plant result|guard]
//
// Exit status 1 if a byte is wrong, 77 if the device is too small for the part. --plant corrupts
// the compared data, so that the program must fail.
#include <cstring>
#include <fstream>
#include <iostream>

#include "parts.h"

namespace {

constexpr int kSkipped = 77;

void print(const parts::Figures& figures) {
  std::cout << figures.device << "\n";
  for (const auto& [name, numbers] : figures.rows) {
    std::printf("%-40s", name.c_str());
    for (const auto& [what, number] : numbers) std::printf("  %10.3f %s", number, what.c_str());
    std::printf("\n");
  }
}

void write_json(const parts::Figures& figures, const std::string& path) {
  std::ofstream file(path);
  file << "{\"device\": \"" << figures.device << "\", \"rows\": [";
  const char* between_rows = "\n";
  for (const auto& [name, numbers] : figures.rows) {
    file << std::exchange(between_rows, ",\n") << "  {\"name\": \"" << name << "\"";
    for (const auto& [what, number] : numbers) file << ", \"" << what << "\": " << number;
    file << "}";
  }
  file << "\n]}\n";
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

struct Arguments {
  std::string part, json;
  int64_t number = 0;  // 0: the part's own

  Arguments(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      if (argument == "--json" && i + 1 < argc) {
        json = argv[++i];
      } else if (argument == "--plant" && i + 1 < argc) {
        device::plant =
            std::strcmp(argv[++i], "guard") == 0 ? device::Plant::kGuard : device::Plant::kResult;
      } else if (part.empty()) {
        part = argument;
      } else {
        number = std::stoll(argument);
      }
    }
  }
  int64_t number_or(int64_t own) const { return number > 0 ? number : own; }
};

// Whether the device was large enough.
bool run(const Arguments& arguments) {
  parts::Figures figures;
  if (arguments.part == "values") {
    parts::values(arguments.number_or(600));
  } else if (arguments.part == "many") {
    parts::many();
  } else if (arguments.part == "large") {
    return parts::large(static_cast<int>(arguments.number_or(31)));
  } else if (arguments.part == "mean") {
    parts::mean();
  } else if (arguments.part == "bandwidth") {
    figures = parts::bandwidth(arguments.number_or(1024));
  } else if (arguments.part == "latency") {
    figures = parts::latency(arguments.number_or(30));
  } else {
    throw std::invalid_argument("unknown part '" + arguments.part + "'");
  }
  if (!figures.rows.empty()) print(figures);
  if (!arguments.json.empty()) write_json(figures, arguments.json);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Arguments arguments(argc, argv);
    CUDA(pipecomm::preload_cuda_copy());
    CUDA(pipecomm::preload_cuda_mean());
    if (!run(arguments)) {
      std::cout << arguments.part << ": skipped, the device has too little free memory\n";
      return kSkipped;
    }
    return check::num_failures == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::cout << "case: " << check::context << "\n" << error.what() << "\n";
    return 1;
  }
}
