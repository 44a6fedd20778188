// Containers that keep their memory: random programs, compared with those of the standard library.

#include <deque>
#include <thread>

#include "check.h"
#include "message/queue.h"
#include "message/recycled.h"
#include "plan/inline_vector.h"

using Element = std::shared_ptr<int>;

constexpr int kNumRounds = 300;

Element element(int value) { return std::make_shared<int>(value); }

template <class Ours, class Model>
void check_equal(const Ours& ours, const Model& model) {
  CHECK_EQ(ours.size(), model.size());
  CHECK_EQ(ours.empty(), model.empty());
  for (size_t idx = 0; idx < model.size(); ++idx) CHECK_EQ(ours[idx], model[idx]);
  if (model.empty()) return;
  CHECK_EQ(ours.front(), model.front());
  CHECK_EQ(ours.back(), model.back());
}

TEST(inline_vectors) {
  for (int round = 0; round < kNumRounds; ++round) {
    check::context = "inline vector " + std::to_string(round);
    std::mt19937 random(round);
    using Ours = InlineVector<Element, 3>;
    Ours ours;
    std::vector<Element> model;
    std::vector<std::weak_ptr<int>> made;
    for (int step = 0; step < 40; ++step) {
      switch (random() % 9) {
        case 0:
        case 1:
        case 2:
          model.push_back(element(step));
          ours.push_back(model.back());
          break;
        case 3:
          if (model.empty()) break;
          model.pop_back();
          ours.pop_back();
          break;
        case 4: {
          const Ours copy = ours;
          check_equal(copy, model);
          CHECK(copy == ours && ours == model && std::vector<Element>(copy) == model);
          break;
        }
        case 5: {
          Ours moved = std::move(ours);
          CHECK(ours.empty());
          check_equal(moved, model);
          ours.push_back(element(-1));  // to be replaced
          ours = std::move(moved);
          CHECK(moved.empty());
          break;
        }
        case 6: {
          std::vector<Element> values(random() % 7);
          for (Element& value : values) value = element(step);
          model = values;
          ours.assign(values.begin(), values.end());
          break;
        }
        case 7: {
          const size_t number = random() % 6;
          model.resize(number);
          ours.resize(number);
          break;
        }
        case 8: {
          const std::vector<Element> more{element(1), element(2)};
          model.insert(model.end(), more.begin(), more.end());
          ours.append(more.begin(), more.end());
          break;
        }
      }
      made.assign(model.begin(), model.end());
      check_equal(ours, model);
      // Nothing that has been removed is kept.
      for (const Element& value : model)
        if (value)
          CHECK_EQ(size_t(value.use_count()),
                   2 * size_t(std::count(model.begin(), model.end(), value)));
    }
    model.clear();
    ours.clear();
    check_equal(ours, model);
    for (const auto& value : made) CHECK(value.expired());
  }
}

TEST(queues) {
  for (int round = 0; round < kNumRounds; ++round) {
    check::context = "queue " + std::to_string(round);
    std::mt19937 random(round);
    Queue<Element> ours;
    std::deque<Element> model;
    for (int step = 0; step < 200; ++step) {
      const auto what = random() % 10;
      if (what < 5) {
        model.push_back(element(step));
        ours.push_back(model.back());
      } else if (what < 8 && !model.empty()) {
        model.pop_front();
        ours.pop_front();
      } else if (what < 9 && !model.empty()) {
        model.pop_back();
        ours.pop_back();
      } else if (what == 9 && random() % 8 == 0) {
        model.clear();
        ours.clear();
      } else if (what == 9) {
        const auto is_chosen = [step](const Element& value) { return *value % 3 == step % 3; };
        std::erase_if(model, is_chosen);
        ours.erase_if(is_chosen);
      }
      check_equal(ours, model);
      for (const Element& value : model) CHECK_EQ(value.use_count(), 2);
    }
  }
}

// Threads take and drop objects at the same time; each one finds its own as it left them.
TEST(recycled_memory) {
  constexpr int kNumThreads = 4;
  struct Large {
    std::array<uint64_t, 40> words;
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kNumThreads; ++thread) {
    threads.emplace_back([thread] {
      std::mt19937 random(thread);
      std::vector<std::shared_ptr<Large>> kept;
      const auto is_whole = [thread](const Large& large) {
        return std::all_of(large.words.begin(), large.words.end(),
                           [&](uint64_t word) { return word == uint64_t(thread); });
      };
      for (int step = 0; step < 20000; ++step) {
        if (random() % 2 == 0 || kept.empty()) {
          kept.push_back(std::allocate_shared<Large>(Recycled<Large>()));
          kept.back()->words.fill(uint64_t(thread));
        } else {
          const size_t idx = random() % kept.size();
          CHECK(is_whole(*kept[idx]));
          kept[idx] = kept.back();
          kept.pop_back();
        }
      }
      for (const auto& large : kept) CHECK(is_whole(*large));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(recycled_memory_is_used_again) {
  if (!kRecycles) return;
  struct Once {
    char bytes[777];
  };
  auto first = std::allocate_shared<Once>(Recycled<Once>());
  const void* const place = first.get();
  first.reset();
  const auto second = std::allocate_shared<Once>(Recycled<Once>());
  CHECK_EQ(static_cast<const void*>(second.get()), place);
}
