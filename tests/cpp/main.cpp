// Runs the tests of one program, all or the named ones, and prints the duration of each:
//   test_NAME [--rounds FACTOR] [test ...]
#include "check.h"

int main(int argc, char** argv) {
  std::set<std::string> chosen;
  for (int idx = 1; idx < argc; ++idx) {
    if (std::string(argv[idx]) == "--rounds" && idx + 1 < argc)
      check::rounds_factor = std::stod(argv[++idx]);
    else
      chosen.insert(argv[idx]);
  }
  const bool runs_all = chosen.empty();
  for (const check::Test& test : check::tests) {
    if (chosen.erase(test.name) == 0 && !runs_all) continue;
    check::context = test.name;
    const int num_before = check::num_failures;
    const auto begin = std::chrono::steady_clock::now();
    try {
      test.body();
    } catch (const std::exception& error) {
      check::fail(__FILE__, __LINE__, error.what());
    }
    const std::chrono::duration<double> duration = std::chrono::steady_clock::now() - begin;
    std::printf("%s %6.2f s  %s\n", check::num_failures == num_before ? "passed" : "FAILED",
                duration.count(), test.name);
    std::fflush(stdout);
  }
  for (const std::string& name : chosen) check::fail(__FILE__, __LINE__, "no test " + name);
  return check::num_failures == 0 ? 0 : 1;
}
