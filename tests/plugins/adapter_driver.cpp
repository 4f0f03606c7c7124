// Drives the plugin library as TensorRT would, through TensorRT's own interfaces, without TensorRT.
//
// Compiled against the public headers by tests/plugins/test_csrc_adapter.py; a fake expression builder writes
// down what it is asked for. Texts go into a buffer of `capacity` bytes.

#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

struct Expression final : public IDimensionExpr {
  explicit Expression(std::string const& given) : text(given) { mImpl = nullptr; }
  ~Expression() override = default;
  std::string text;
};

// Every virtual method of the builder's implementation; expressions live as long as it does.
struct FakeExpressions final : public apiv::VExprBuilder {
  std::deque<Expression> made;
  IDimensionExpr const* keep(std::string const& text) { return &made.emplace_back(text); }
  IDimensionExpr const* constant(int64_t value) noexcept override { return keep(std::to_string(value)); }
  IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& a,
                                  IDimensionExpr const& b) noexcept override {
    char const sign = op == DimensionOperation::kSUM    ? '+'
                      : op == DimensionOperation::kSUB  ? '-'
                      : op == DimensionOperation::kPROD ? '*'
                                                        : '?';
    return keep("(" + static_cast<Expression const&>(a).text + sign + static_cast<Expression const&>(b).text + ")");
  }
  IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override {
    return keep("size");
  }
};

struct Builder final : public IExprBuilder {
  explicit Builder(FakeExpressions& expressions) { mImpl = &expressions; }
  ~Builder() override = default;
};

constexpr DataType TYPES[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT32, DataType::kBOOL};

PluginTensorDesc describe(int64_t const*& dims, int rank, int dtype) {
  PluginTensorDesc desc = {};
  desc.dims.nbDims = rank;
  for (int axis = 0; axis < rank; ++axis) desc.dims.d[axis] = *dims++;
  desc.type = dtype < 0 ? DataType::kINT8 : TYPES[dtype];
  desc.format = TensorFormat::kLINEAR;
  return desc;
}

std::vector<PluginTensorDesc> describe_all(int64_t const* dims, int const* ranks, int const* dtypes, int count) {
  std::vector<PluginTensorDesc> descs;
  for (int i = 0; i < count; ++i) descs.push_back(describe(dims, ranks[i], dtypes[i]));
  return descs;
}

std::vector<DynamicPluginTensorDesc> dynamic(std::vector<PluginTensorDesc> const& descs) {
  std::vector<DynamicPluginTensorDesc> made;
  for (auto const& desc : descs) made.push_back({desc, desc.dims, desc.dims, desc.dims});
  return made;
}

IPluginV3OneBuild* build_of(IPluginV3* plugin) {
  return static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
}

IPluginV3OneRuntime* runtime_of(IPluginV3* plugin) {
  return static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

std::string text_of(PluginFieldCollection const& fields) {
  std::string text;
  char number[64] = "";
  for (int f = 0; f < fields.nbFields; ++f) {
    PluginField const& field = fields.fields[f];
    if (field.data != nullptr) {
      double const value = field.type == PluginFieldType::kINT32 ? *static_cast<int32_t const*>(field.data)
                                                                 : *static_cast<float const*>(field.data);
      std::snprintf(number, sizeof number, "=%.9g", value);
    }
    text += std::string(field.name) + ":" + std::to_string(static_cast<int>(field.type)) + number + " ";
  }
  return text;
}

struct Logger final : public ILogger {
  std::string last;
  void log(Severity, char const* text) noexcept override { last = text; }
} logger;

struct Finder final : public ILoggerFinder {
  ILogger* findLogger() override { return &logger; }
} finder;

void* library = nullptr;

}  // namespace

extern "C" {

// Creators of the library at `path`: "name/version/namespace fields" a line.
int driver_open(char const* path, char* text, int capacity) {
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::snprintf(text, capacity, "%s", dlerror());
    return 1;
  }
  reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"))(&finder);
  int32_t count = 0;
  auto const get = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
  auto* const* const creators = get(count);
  std::string lines;
  for (int i = 0; i < count; ++i) {
    auto* const one = static_cast<IPluginCreatorV3One*>(creators[i]);
    lines += std::string(one->getPluginName()) + "/" + one->getPluginVersion() + "/" + one->getPluginNamespace() +
             " " + text_of(*one->getFieldNames()) + "\n";
  }
  std::snprintf(text, capacity, "%s", lines.c_str());
  return 0;
}

char const* driver_last_log() { return logger.last.c_str(); }

// A plugin from its fields, which are f32 where `is_float`; nullptr with the refusal in the log.
void* driver_create(char const* name, char const* const* names, double const* values, int const* is_float, int count) {
  std::vector<int32_t> ints(count);
  std::vector<float> floats(count);
  std::vector<PluginField> fields;
  for (int i = 0; i < count; ++i) {
    ints[i] = static_cast<int32_t>(values[i]);
    floats[i] = static_cast<float>(values[i]);
    fields.emplace_back(names[i], is_float[i] ? static_cast<void const*>(&floats[i]) : &ints[i],
                        is_float[i] ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32, 1);
  }
  PluginFieldCollection const collection = {count, fields.data()};
  int32_t num_creators = 0;
  auto const get = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
  auto* const* const creators = get(num_creators);
  for (int i = 0; i < num_creators; ++i) {
    auto* const one = static_cast<IPluginCreatorV3One*>(creators[i]);
    if (std::strcmp(one->getPluginName(), name) == 0) return one->createPlugin("layer", &collection, TensorRTPhase::kBUILD);
  }
  return nullptr;
}

void driver_destroy(void* plugin) { delete static_cast<IPluginV3*>(plugin); }

void* driver_clone(void* plugin) { return static_cast<IPluginV3*>(plugin)->clone(); }

void driver_serialized(void* plugin, char* text, int capacity) {
  std::snprintf(text, capacity, "%s", text_of(*runtime_of(static_cast<IPluginV3*>(plugin))->getFieldsToSerialize()).c_str());
}

// Shapes of the outputs over inputs called a0, a1, b0, …, a line each, then the types' numbers.
int driver_outputs(void* plugin, int const* ranks, int num_inputs, char* text, int capacity) {
  IPluginV3OneBuild* const build = build_of(static_cast<IPluginV3*>(plugin));
  FakeExpressions expressions;
  Builder builder(expressions);
  std::vector<DimsExprs> inputs(num_inputs), outputs(build->getNbOutputs());
  for (int i = 0; i < num_inputs; ++i) {
    inputs[i].nbDims = ranks[i];
    for (int axis = 0; axis < ranks[i]; ++axis)
      inputs[i].d[axis] = expressions.keep(std::string(1, static_cast<char>('a' + i)) + std::to_string(axis));
  }
  int const count = static_cast<int>(outputs.size());
  int status = build->getOutputShapes(inputs.data(), num_inputs, nullptr, 0, outputs.data(), count, builder);
  if (status != 0) return status;
  std::vector<DataType> types(count), given(num_inputs, DataType::kFLOAT);
  status = build->getOutputDataTypes(types.data(), count, given.data(), num_inputs);
  std::string lines;
  for (DimsExprs const& shape : outputs) {
    for (int axis = 0; axis < shape.nbDims; ++axis) lines += static_cast<Expression const*>(shape.d[axis])->text + " ";
    lines += "\n";
  }
  for (DataType type : types) lines += std::to_string(static_cast<int>(type)) + " ";
  std::snprintf(text, capacity, "%s", lines.c_str());
  return status;
}

// `position` among all tensors, inputs first; a `dtype` of -1 is one that no tensor has.
int driver_supports(void* plugin, int position, int dtype, int is_linear, int num_inputs) {
  IPluginV3OneBuild* const build = build_of(static_cast<IPluginV3*>(plugin));
  int const count = num_inputs + build->getNbOutputs();
  std::vector<int64_t> const dims(count, 1);
  std::vector<int> const ranks(count, 1), dtypes(count, dtype);
  auto tensors = dynamic(describe_all(dims.data(), ranks.data(), dtypes.data(), count));
  if (!is_linear) tensors[position].desc.format = TensorFormat::kCHW4;
  return build->supportsFormatCombination(position, tensors.data(), num_inputs, build->getNbOutputs());
}

// configurePlugin and onShapeChange with these shapes, inputs then outputs; the workspace in `bytes`.
int driver_configure(void* plugin, int64_t const* dims, int const* ranks, int const* dtypes, int num_inputs,
                     int num_tensors, uint64_t* bytes) {
  auto const descs = describe_all(dims, ranks, dtypes, num_tensors);
  auto const tensors = dynamic(descs);
  int const num_outputs = num_tensors - num_inputs;
  auto* const found = static_cast<IPluginV3*>(plugin);
  *bytes = build_of(found)->getWorkspaceSize(tensors.data(), num_inputs, tensors.data() + num_inputs, num_outputs);
  int const status = build_of(found)->configurePlugin(tensors.data(), num_inputs, tensors.data() + num_inputs, num_outputs);
  return status ? status : runtime_of(found)->onShapeChange(descs.data(), num_inputs, descs.data() + num_inputs, num_outputs);
}

// configurePlugin for sizes that are not known yet, of which these are the most.
int driver_configure_dynamic(void* plugin, int64_t const* dims, int const* ranks, int const* dtypes, int num_inputs,
                             int num_tensors) {
  auto tensors = dynamic(describe_all(dims, ranks, dtypes, num_tensors));
  for (auto& tensor : tensors)
    for (int axis = 0; axis < tensor.desc.dims.nbDims; ++axis) tensor.desc.dims.d[axis] = -1;
  return build_of(static_cast<IPluginV3*>(plugin))
      ->configurePlugin(tensors.data(), num_inputs, tensors.data() + num_inputs, num_tensors - num_inputs);
}

// The plugin that an execution context gets; nullptr with the refusal in the log.
void* driver_attach(void* plugin) { return runtime_of(static_cast<IPluginV3*>(plugin))->attachToContext(nullptr); }

int driver_enqueue(void* plugin, int64_t const* dims, int const* ranks, int const* dtypes, uint64_t const* addresses,
                   int num_inputs, int num_tensors, void* workspace, void* stream) {
  auto const descs = describe_all(dims, ranks, dtypes, num_tensors);
  std::vector<void*> pointers;
  for (int i = 0; i < num_tensors; ++i) pointers.push_back(reinterpret_cast<void*>(addresses[i]));
  return runtime_of(static_cast<IPluginV3*>(plugin))
      ->enqueue(descs.data(), descs.data() + num_inputs, pointers.data(), pointers.data() + num_inputs, workspace,
                static_cast<cudaStream_t>(stream));
}

}  // extern "C"
