// Tensors with gaps between their elements: their messages, and the number of launches.
#include "device_world.h"

constexpr int64_t kRows = 5, kColumns = 80;

// A matrix whose columns are sent. The element of row r and column c is `first + 100 * r + c`.
struct Table {
  Tensor tensor{{kRows, kColumns}};
  explicit Table(float first) { fill(first); }

  void fill(float first) const {
    for (int64_t idx = 0; idx < kRows * kColumns; ++idx)
      (*tensor.data)[size_t(idx)] = value(first, idx % kColumns, idx / kColumns);
  }
  static float value(float first, int64_t column, int64_t row) {
    return first + 100 * float(row) + float(column);
  }
  TensorRef column(int64_t idx) const {
    TensorRef ref = tensor.ref();
    ref.shape = {kRows};
    ref.strides = {kColumns};
    ref.data += idx * int64_t(sizeof(float));
    return ref;
  }
  bool has_column_of(float first, int64_t idx) const {
    for (int64_t row = 0; row < kRows; ++row)
      if ((*tensor.data)[size_t(row * kColumns + idx)] != value(first, idx, row)) return false;
    return true;
  }
};

// 40 columns on two channels, one for this rank itself, and a tensor without gaps.
struct Columns {
  static constexpr int kNumSent = 40, kOwn = 51;
  Rank& me;
  const int peer = 1 - me.rank;
  Table mine{mine_first()}, theirs{-1};
  Tensor whole{{4}, float(me.rank)}, received{{4}};

  float mine_first() const { return 1000 * float(me.rank + 1); }
  float theirs_first() const { return 1000 * float(peer + 1); }

  std::vector<PointToPoint> batch() const {
    std::vector<PointToPoint> batch;
    for (int idx = 0; idx < kNumSent; ++idx) {
      batch.push_back({Direction::send, peer, idx % 2, mine.column(idx)});
      batch.push_back({Direction::recv, peer, idx % 2, theirs.column(idx)});
    }
    batch.push_back({Direction::send, me.rank, 0, mine.column(kOwn)});
    batch.push_back({Direction::recv, me.rank, 0, theirs.column(kOwn)});
    batch.push_back(whole.to(peer));
    batch.push_back(received.from(peer));
    return batch;
  }
  void forget() const {
    mine.fill(mine_first());
    theirs.fill(-1);
  }
  void verify() const {
    for (int idx = 0; idx < kColumns; ++idx) {
      const float first = idx < kNumSent ? theirs_first() : idx == kOwn ? mine_first() : -1;
      CHECK(theirs.has_column_of(first, idx));
      CHECK(mine.has_column_of(mine_first(), idx));
    }
    CHECK(received.counts_from(float(peer)));
  }
};

// One launch packs all sends, and one for each lane with receives unpacks those.
TEST(a_batch_is_packed_in_one_launch) {
  run(options_of(2), [](Rank& me) {
    const Columns columns{me};
    const int num_launches =
        1 + 2 +
        (me.rank == 0 ? 1 : 0);  // one's own message: on the first lane, from the lower rank
    for (const bool is_async : {false, true, true}) {
      columns.forget();
      const int num_before = me.runtime->num_launches;
      const OperationPtr operation = me.p2p(columns.batch(), is_async);
      CHECK(me.runtime->num_launches == num_before + num_launches);
      me.follow(operation);
      me.finish(operation);
      columns.verify();
    }
    const int num_before = me.runtime->num_launches;
    me.finish(me.p2p({columns.whole.to(columns.peer), columns.received.from(columns.peer)}));
    CHECK(me.runtime->num_launches == num_before);
  });
}

TEST(captured_batches_pack_in_every_replay) {
  run(options_of(2), [](Rank& me) {
    const Columns columns{me};
    me.finish(me.p2p(columns.batch()));
    meet(me);
    const auto sync_graph = capture(me, [&] { me.p2p(columns.batch(), false); });
    const auto async_graph = capture(me, [&] { me.follow(me.p2p(columns.batch(), true)); });
    const int num_launches = me.runtime->num_launches;
    for (const fake::GraphPtr& graph : {sync_graph, async_graph, sync_graph}) {
      columns.forget();
      meet(me);
      play(me, graph);
      columns.verify();
    }
    CHECK(me.runtime->num_launches == num_launches);
  });
}

TEST(broadcasts) {
  run(options_of(3), [](Rank& me) {
    const Table table(me.rank == 1 ? 7 : -1);
    const TensorRef column = table.column(3);
    for (const bool is_async : {false, true}) {
      const int num_before = me.runtime->num_launches;
      me.finish(me.comm->broadcast(column, 1, {.is_async = is_async}));
      CHECK(me.runtime->num_launches == num_before + 1);
      CHECK(table.has_column_of(7, 3) && table.has_column_of(me.rank == 1 ? 7 : -1, 4));
    }
  });
}
