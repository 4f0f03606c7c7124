#include "launch.h"

#include <algorithm>

namespace av {
namespace {

// Of score.cu, tree.cuh, tree_score.cu and tree_trim.cu.
constexpr int64_t SCORE_THREADS = 256, UNROLL = 4, RESIDENT_BLOCKS = 5, MAX_SPLITS = 32;
constexpr int64_t VECTOR_BYTES = 16;
constexpr int NODE_THREADS = 256, LEVEL_THREADS = 1024, READ_THREADS = 64, WARP = 32, MIN_TRIM_THREADS = 256;
constexpr int64_t SNAPSHOT_BYTES = 256, ALIGNMENT = 256;

// `Shape` of score.cu.
struct Shape {
  int64_t row_stride, column_stride, mask_stride;
  int32_t columns, positions, vocab_size, vectors_per_split;
};

// `Gather` of pack.cuh; all zero gathers nothing.
struct Gather {
  uint64_t last_tokens, draft_tokens, kv_lens, slots;
  int64_t draft_tokens_stride, slot_stride, pad_offset;
  uint64_t token_ids, positions, write_offsets;
  int32_t wide, unused;  // no byte is left undefined
};

char const* const FORMATS[NUM_DTYPES] = {"f32", "f16", "bf16", "i32", "bool"};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t aligned(int64_t bytes) { return divide_up(bytes, ALIGNMENT) * ALIGNMENT; }

Launch kernel(char const* source, std::string const& name, int64_t x, int64_t y, int64_t z, int num_threads) {
  Launch step;
  step.source = source;
  step.kernel = name;
  step.grid[0] = static_cast<int>(x);
  step.grid[1] = static_cast<int>(y);
  step.grid[2] = static_cast<int>(z);
  step.num_threads = num_threads;
  return step;
}

int32_t narrow(double value) { return static_cast<int32_t>(value); }

int64_t splits_of_row(int64_t rows, int64_t vectors, int64_t processors) {
  int64_t const most =
      std::max<int64_t>(1, std::min(RESIDENT_BLOCKS * processors / rows, MAX_SPLITS));
  int64_t const turns = std::max<int64_t>(1, divide_up(vectors, most * SCORE_THREADS * UNROLL));
  return std::max<int64_t>(1, divide_up(vectors, turns * SCORE_THREADS * UNROLL));
}

std::vector<Launch> score_drafts(Fields const& fields, Invocation const& call) {
  Binding const& logits = call.inputs[0];
  bool const is_masked = call.inputs.size() > 5;
  int64_t const rows = logits.dims[0], columns = logits.dims[1], width = logits.dims[2];
  if (rows * columns == 0) return {};
  int64_t const vocab_size = narrow(fields.at("vocab_size"));
  int64_t const vectors = vocab_size * ITEM_BYTES[logits.dtype] / VECTOR_BYTES;
  int64_t const splits = splits_of_row(rows * columns, vectors, call.num_processors);
  Shape const shape = {columns * width,
                       width,
                       is_masked ? width : 0,
                       narrow(columns),
                       narrow(call.inputs[2].dims[0] - 1),
                       narrow(vocab_size),
                       narrow(divide_up(vectors, splits))};
  Launch score = kernel("score", std::string("score_") + (is_masked ? "masked_" : "") + FORMATS[logits.dtype],
                      splits, columns, rows, SCORE_THREADS);
  score.pass(logits.address)
      .pass(shape)
      .pass(call.inputs[1].address)
      .pass(static_cast<float>(fields.at("temperature_floor")))
      .pass(call.inputs[2].address)
      .pass(static_cast<float>(fields.at("feature_bound")))
      .pass(call.inputs[3].address)
      .pass(is_masked ? call.inputs[5].address : uint64_t{0})
      .pass(call.inputs[4].address)
      .pass(splits > 1 ? call.scratch.mailboxes : uint64_t{0})
      .pass(call.outputs[0].address)
      .pass(call.outputs[1].address);
  return {score};
}

std::vector<Launch> trim_drafts(Invocation const& call) {
  int64_t const rows = call.inputs[0].dims[0], positions = call.inputs[0].dims[1];
  char const* const unrolled = positions <= 4 ? "4" : positions <= 8 ? "8" : "16";
  int64_t const threads = std::max<int64_t>(divide_up(rows, WARP) * WARP, MIN_TRIM_THREADS);
  Launch trim = kernel("trim_pack", std::string("trim_pack_") + unrolled, 1, 1, 1, narrow(threads));
  for (Binding const& tensor : call.inputs) trim.pass(tensor.address);
  trim.pass(narrow(rows)).pass(narrow(positions));
  for (Binding const& tensor : call.outputs) trim.pass(tensor.address);
  trim.pass(narrow(positions + 1)).pass(narrow(rows * (positions + 1))).pass(Gather{});
  return {trim};
}

std::vector<Launch> score_level(Fields const& fields, Invocation const& call) {
  Binding const &logits = call.inputs[0], &paths = call.inputs[2];
  int64_t const rows = paths.dims[0], nodes = paths.dims[1], depths = paths.dims[2];
  if (rows == 0) return {};
  int32_t const level = narrow(fields.at("level"));
  uint64_t const words = call.scratch.workspace;
  uint64_t const counts = words + static_cast<uint64_t>(aligned(rows * nodes * 4));
  Launch decode = kernel("tree_score", "tree_nodes", rows, 1, 1, NODE_THREADS);
  decode.pass(paths.address).pass(narrow(nodes)).pass(narrow(depths)).pass(level).pass(words).pass(counts);
  Launch score = kernel("tree_score", std::string("score_level_") + FORMATS[logits.dtype],
                      narrow(fields.at("max_non_leaves")), rows, 1, LEVEL_THREADS);
  score.pass(logits.address)
      .pass(logits.dims[1])
      .pass(narrow(fields.at("vocab_size")))
      .pass(call.inputs[1].address)
      .pass(words)
      .pass(counts)
      .pass(narrow(nodes))
      .pass(level)
      .pass(static_cast<float>(fields.at("feature_bound")))
      .pass(call.inputs[3].address)
      .pass(call.outputs[0].address)
      .pass(call.outputs[1].address);
  return {decode, score};
}

std::vector<Launch> trim_tree(Fields const& fields, Invocation const& call) {
  Binding const &features = call.inputs[0], &lens = call.inputs[1], &paths = call.inputs[2];
  int64_t const rows = paths.dims[0], nodes = paths.dims[1], depths = paths.dims[2], drafts = nodes - 1;
  uint64_t const snapshot = call.scratch.workspace, confidence = snapshot + SNAPSHOT_BYTES;
  uint64_t const keys = confidence + static_cast<uint64_t>(aligned(rows * drafts * 4));
  uint64_t const trace = call.outputs[1].address;
  Launch read = kernel("tree_trim", "read_control", 1, 1, 1, READ_THREADS);
  read.pass(call.scratch.control).pass(snapshot);
  if (rows == 0) return {read};
  Launch give_keys = kernel("tree_trim", "tree_keys", rows, 1, 1, NODE_THREADS);
  give_keys.pass(features.address)
      .pass(lens.address)
      .pass(paths.address)
      .pass(snapshot)
      .pass(narrow(nodes))
      .pass(narrow(depths))
      .pass(confidence)
      .pass(keys)
      .pass(trace);
  Launch trim = kernel("tree_trim", "tree_trim", 1, 1, 1, narrow(divide_up(rows, WARP) * WARP));
  trim.pass(keys).pass(lens.address).pass(snapshot);
  for (size_t i = 3; i < call.inputs.size(); ++i) trim.pass(call.inputs[i].address);
  trim.pass(narrow(rows))
      .pass(narrow(drafts))
      .pass(narrow(fields.at("min_draft_len")))
      .pass(narrow(fields.at("total_multiple")))
      .pass(call.outputs[0].address)
      .pass(trace);
  return {read, give_keys, trim};
}

}  // namespace

uint64_t workspace_bytes(Plugin const& plugin, std::vector<Dims> const& inputs) {
  std::string const name = plugin.name;
  int64_t bytes = 0;
  if (name == "ScoreLevel") bytes = aligned(inputs[2][0] * inputs[2][1] * 4) + inputs[2][0] * 4;
  if (name == "TrimTree") bytes = SNAPSHOT_BYTES + 2 * aligned(inputs[0][0] * inputs[0][1] * 4);
  return static_cast<uint64_t>(bytes);
}

uint64_t mailbox_bytes(Plugin const& plugin, int num_processors) {
  return std::string(plugin.name) == "ScoreDrafts" ? static_cast<uint64_t>(RESIDENT_BLOCKS * num_processors * 8) : 0;
}

std::vector<Launch> launches(Plugin const& plugin, Fields const& fields, Invocation const& call) {
  std::string const name = plugin.name;
  if (name == "ScoreDrafts") return score_drafts(fields, call);
  if (name == "TrimDrafts") return trim_drafts(call);
  if (name == "ScoreLevel") return score_level(fields, call);
  return trim_tree(fields, call);
}

std::string source_of(Plugin const& plugin) {
  std::string const name = plugin.name;
  if (name == "ScoreDrafts") return "score";
  if (name == "TrimDrafts") return "trim_pack";
  return name == "ScoreLevel" ? "tree_score" : "tree_trim";
}

}  // namespace av
