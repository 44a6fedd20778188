// The few lines of a test framework that these tests need: failed checks are printed and counted.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>

namespace check {

inline int num_failures = 0;
inline std::string context;  // the case in hand, printed with a failure

inline void fail(const char* file, int line, const std::string& what) {
  ++num_failures;
  std::printf("%s:%d: %s\n    case: %s\n", file, line, what.c_str(), context.c_str());
  if (num_failures >= 20) {
    std::printf("giving up after 20 failures\n");
    std::exit(1);
  }
}

template <typename Function>
void expect_invalid(const char* file, int line, const std::string& text, const Function& function) {
  try {
    function();
  } catch (const std::invalid_argument& error) {
    if (std::string(error.what()).find(text) == std::string::npos) {
      fail(file, line, "the message does not contain '" + text + "': " + error.what());
    }
    return;
  }
  fail(file, line, "no std::invalid_argument with '" + text + "'");
}

inline int report(const char* name) {
  std::printf("%s: %s\n", name, num_failures == 0 ? "passed" : "FAILED");
  return num_failures == 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQ(a, b)                                                               \
  do {                                                                               \
    const auto check_a = (a);                                                        \
    const auto check_b = (b);                                                        \
    if (!(check_a == check_b)) {                                                     \
      std::ostringstream check_text;                                                 \
      check_text << #a << " == " << #b << ": " << check_a << " against " << check_b; \
      check::fail(__FILE__, __LINE__, check_text.str());                             \
    }                                                                                \
  } while (false)

#define CHECK_INVALID(text, ...) \
  check::expect_invalid(__FILE__, __LINE__, text, [&] { (void)(__VA_ARGS__); })
