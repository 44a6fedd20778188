// On which cores threads run, and how they get to another one.

#include <sched.h>

#include "check.h"
#include "transport/cores.h"

TEST(cores_suffice_if_there_is_one_for_each_rank) {
  const CoreSet all = usable_cores();
  CHECK(all.count() >= 1);
  const int num_cores = static_cast<int>(all.count());
  CHECK(SharedCores(num_cores).suffice());
  CHECK(!SharedCores(num_cores + 1).suffice());
  std::thread pinned([&] {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(all._Find_first(), &set);
    CHECK_EQ(sched_setaffinity(0, sizeof set, &set), 0);
    CHECK_EQ(usable_cores().count(), 1u);
    SharedCores cores(num_cores);
    CHECK_EQ(cores.suffice(), num_cores == 1);
    cores.add(all);  // those of its peers
    CHECK(cores.suffice());
  });
  pinned.join();
}

TEST(a_thread_moves_and_may_run_where_it_could_before) {
  const CoreSet all = usable_cores();
  for (size_t core = 0; core < all.size(); ++core) {
    if (!all[core]) continue;
    CHECK(move_to(CoreSet().set(core)));
    CHECK(usable_cores() == all);
  }
  CHECK(!move_to(CoreSet()));
  CHECK(!move_to(~all));  // it may run on none of them
  CHECK(usable_cores() == all);
}

TEST(emptier_cores_have_fewer_ranks_than_that_of_the_thread) {
  const auto set = [](std::initializer_list<size_t> cores) {
    CoreSet chosen;
    for (const size_t core : cores) chosen.set(core);
    return chosen;
  };
  const CoreSet usable = set({0, 1, 1023});
  const auto emptier = [](int core, const CoreSet& from, const std::vector<int>& others) {
    return emptier_cores(core, from, others);
  };
  CHECK(emptier(0, usable, {}).none());
  CHECK(emptier(0, usable, {1, 1023}).none());
  CHECK(emptier(0, usable, {0}) == set({1, 1023}));
  CHECK(emptier(1, usable, {1, 0, 2}) == set({1023}));
  CHECK(emptier(1023, usable, {0, 1, 1023}).none());  // no core would have fewer ranks than now
  CHECK(emptier(1023, usable, {0, 1, 1, 1023, 1023}) == set({0}));
  CHECK(emptier(5, set({5}), {5, 5}).none());
  CHECK(emptier(5, usable, {5}) == usable);  // its affinity has changed since
}

TEST(texts_for_cores) {
  const auto set = [](const std::vector<size_t>& cores) {
    CoreSet chosen;
    for (const size_t core : cores) chosen.set(core);
    return chosen;
  };
  CHECK(parse_cores("0\n") == set({0}));
  CHECK(parse_cores("0-3,8,10-11\n") == set({0, 1, 2, 3, 8, 10, 11}));
  CHECK(parse_cores("1022-99999") == set({1022, 1023}));
  CHECK(parse_cores("5000").none());
  for (const char* text : {"", "\n", "x", "1-", "1,", "-1"}) CHECK(parse_cores(text).all());
  for (size_t core = 0; core < usable_cores().size(); ++core)
    if (usable_cores()[core]) CHECK(near_cores(int(core))[core]);
}
