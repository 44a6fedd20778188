// The few lines of a test framework that these tests need, and the headers of the standard library
// for all of them: this file is precompiled. main.cpp runs what TEST defines.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <latch>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace pipecomm {}
using namespace pipecomm;
using namespace std::chrono_literals;

namespace check {

#ifdef SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// The number of rounds of a loop that looks for rare errors. A sanitizer makes each round several
// times as slow, but detects an error in any of them.
inline double rounds_factor = kSanitized ? 0.1 : 1;  // --rounds of main.cpp
inline int rounds(int number) { return std::max(1, int(number * rounds_factor)); }

inline int num_failures = 0;
inline std::string context;  // the current case, printed with a failure

struct Test {
  const char* name;
  void (*body)();
};
inline std::vector<Test> tests;  // of this program, in the order of their definition
inline bool add(const Test& test) { return tests.push_back(test), true; }

inline void fail(const char* file, int line, const std::string& what) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  ++num_failures;
  std::printf("%s:%d: %s\n    case: %s\n", file, line, what.c_str(), context.c_str());
  if (num_failures >= 20) {
    std::printf("giving up after 20 failures\n");
    std::exit(1);
  }
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline void expect_contains(const char* file, int line, const std::string& text,
                            const std::string& part) {
  if (!contains(text, part)) fail(file, line, "'" + part + "' is not in: " + text);
}

template <typename Error, typename Function>
void expect_throw(const char* file, int line, const std::string& text, const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return expect_contains(file, line, error.what(), text);
  }
  fail(file, line, "no error with '" + text + "'");
}

// Runs body(number) for each number below `num`, each on a separate thread.
template <typename Body>
void in_threads(int num, const Body& body) {
  std::vector<std::jthread> threads;
  for (int number = 0; number < num; ++number)
    threads.emplace_back([&body, number] { body(number); });
}

inline int report(const char* name) {
  std::printf("%s: %s\n", name, num_failures == 0 ? "passed" : "FAILED");
  return num_failures == 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                                      \
  static void test_##name();                                                            \
  [[maybe_unused]] static const bool name##_is_test = check::add({#name, test_##name}); \
  static void test_##name()

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

#define CHECK_CONTAINS(text, part) check::expect_contains(__FILE__, __LINE__, text, part)

// The statement throws an Error whose text contains `part`.
#define CHECK_THROWS(Error, part, ...) \
  check::expect_throw<Error>(__FILE__, __LINE__, part, [&] { (void)(__VA_ARGS__); })
#define CHECK_INVALID(part, ...) CHECK_THROWS(std::invalid_argument, part, __VA_ARGS__)
