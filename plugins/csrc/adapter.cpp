// IPluginV3 and creators over the core, for TensorRT 10.11 and newer; compiled against the public headers
// and linked against nothing of TensorRT or CUDA.
//
// Exports: getCreators and setLoggerFinder, which IPluginRegistry::loadLibrary asks for; initAvPlugins, which
// registers in a process that has TensorRT loaded; av_control_block, the memory a runtime writes. A process that
// preloads the library (LD_PRELOAD) with TRTLLM_AV_LOAD_PLUGINS=1 registers when it creates a runtime.
//
// Invariants: no exception leaves a method; what a plugin is lies in its fields; enqueue uses the given
// stream only, allocates no device memory and does not wait.

#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>

#include "control_block.h"
#include "driver.h"

namespace av {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IDimensionExpr;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

constexpr char const* NAMESPACE = "trtllm_av";
constexpr char const* VERSION = "1";

nvinfer1::ILoggerFinder* logger_finder = nullptr;
nvinfer1::ILogger* given_logger = nullptr;

// 0 for an empty refusal; otherwise logs it and returns -1.
int32_t report(std::string const& refusal) {
  if (refusal.empty()) return 0;
  nvinfer1::ILogger* const logger = logger_finder != nullptr ? logger_finder->findLogger() : given_logger;
  std::string const line = "trtllm_av: " + refusal;
  if (logger != nullptr)
    logger->log(nvinfer1::ILogger::Severity::kERROR, line.c_str());
  else
    std::fprintf(stderr, "%s\n", line.c_str());
  return -1;
}

// Runs `method`, which returns a refusal, and lets nothing escape.
template <class Method>
int32_t guarded(Method method) noexcept {
  try {
    return report(method());
  } catch (std::exception const& error) {
    std::fprintf(stderr, "trtllm_av: %s\n", error.what());
    return -1;
  }
}

constexpr DataType TYPES[NUM_DTYPES] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT32,
                                        DataType::kBOOL};

DType dtype_of(DataType type) {
  for (int i = 0; i < NUM_DTYPES; ++i)
    if (TYPES[i] == type) return static_cast<DType>(i);
  return OTHER;
}

Dims dims_of(nvinfer1::Dims const& dims) { return Dims(dims.d, dims.d + dims.nbDims); }

std::vector<Binding> bind(PluginTensorDesc const* descs, void const* const* addresses, int count) {
  std::vector<Binding> bindings;
  for (int i = 0; i < count; ++i)
    bindings.push_back(
        {reinterpret_cast<uint64_t>(addresses[i]), dims_of(descs[i].dims), dtype_of(descs[i].type)});
  return bindings;
}

// TensorRT's expressions as the core builds them.
struct Expressions {
  nvinfer1::IExprBuilder& builder;
  using Expr = IDimensionExpr const*;
  Expr constant(int64_t value) { return builder.constant(value); }
  Expr operation(char sign, Expr a, Expr b) {
    using Kind = nvinfer1::DimensionOperation;
    return builder.operation(sign == '+' ? Kind::kSUM : sign == '-' ? Kind::kSUB : Kind::kPROD, *a, *b);
  }
};

// Values of a plugin's fields, as TensorRT serialises them.
class FieldValues {
 public:
  FieldValues(Plugin const& plugin, Fields const& fields) : ints_(plugin.num_fields), floats_(plugin.num_fields) {
    for (int f = 0; f < plugin.num_fields; ++f) {
      Field const& field = plugin.fields[f];
      double const value = fields.at(field.name);
      ints_[f] = field.is_float ? 0 : static_cast<int32_t>(value);
      floats_[f] = static_cast<float>(value);
      void const* const data = field.is_float ? static_cast<void const*>(&floats_[f]) : &ints_[f];
      fields_.emplace_back(field.name, data, field.is_float ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32,
                           1);
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  PluginFieldCollection const* collection() const { return &collection_; }

 private:
  std::vector<int32_t> ints_;
  std::vector<float> floats_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_;
};

std::string read_value(PluginField const& field, double& value) {
  if (field.data == nullptr || field.length < 1) return std::string("field ") + field.name + " is empty";
  switch (field.type) {
    case PluginFieldType::kINT32: value = *static_cast<int32_t const*>(field.data); return "";
    case PluginFieldType::kINT64: value = static_cast<double>(*static_cast<int64_t const*>(field.data)); return "";
    case PluginFieldType::kFLOAT32: value = *static_cast<float const*>(field.data); return "";
    case PluginFieldType::kFLOAT64: value = *static_cast<double const*>(field.data); return "";
    default: return std::string("field ") + field.name + " is no number";
  }
}

class AdaptivePlugin final : public nvinfer1::IPluginV3,
                             public nvinfer1::IPluginV3OneCore,
                             public nvinfer1::IPluginV3OneBuild,
                             public nvinfer1::IPluginV3OneRuntime {
 public:
  AdaptivePlugin(Plugin const& plugin, Fields const& fields)
      : plugin_(plugin), fields_(fields), serialized_(plugin, fields) {}
  AdaptivePlugin(AdaptivePlugin const&) = delete;
  AdaptivePlugin& operator=(AdaptivePlugin const&) = delete;
  ~AdaptivePlugin() override { release(mailboxes_); }

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }
  nvinfer1::IPluginV3* clone() noexcept override {
    try {
      return new AdaptivePlugin(plugin_, fields_);
    } catch (std::exception const&) {
      return nullptr;
    }
  }

  char const* getPluginName() const noexcept override { return plugin_.name; }
  char const* getPluginVersion() const noexcept override { return VERSION; }
  char const* getPluginNamespace() const noexcept override { return NAMESPACE; }

  int32_t getNbOutputs() const noexcept override { return plugin_.num_outputs; }

  int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t num_inputs, DynamicPluginTensorDesc const*,
                          int32_t num_outputs) noexcept override {
    return guarded([&] {
      std::string refusal = check_counts(plugin_, num_inputs, num_outputs);
      std::vector<Dims> given, most;
      for (int i = 0; i < num_inputs && refusal.empty(); ++i) {
        given.push_back(dims_of(in[i].desc.dims));
        most.push_back(dims_of(in[i].max));
      }
      if (refusal.empty()) refusal = check_shapes(plugin_, fields_, given);
      return refusal.empty() ? check_limits(plugin_, most) : refusal;
    });
  }

  int32_t getOutputDataTypes(DataType* types, int32_t num_outputs, DataType const*,
                             int32_t num_inputs) const noexcept override {
    return guarded([&] {
      std::string const refusal = check_counts(plugin_, num_inputs, num_outputs);
      for (int i = 0; i < num_outputs && refusal.empty(); ++i) types[i] = TYPES[output_dtype(plugin_, i)];
      return refusal;
    });
  }

  int32_t getOutputShapes(DimsExprs const* in, int32_t num_inputs, DimsExprs const*, int32_t, DimsExprs* out,
                          int32_t num_outputs, nvinfer1::IExprBuilder& builder) noexcept override {
    return guarded([&] {
      std::string refusal = check_counts(plugin_, num_inputs, num_outputs);
      std::vector<int> ranks;
      for (int i = 0; i < num_inputs; ++i) ranks.push_back(in[i].nbDims);
      if (refusal.empty()) refusal = check_ranks(plugin_, ranks);
      if (!refusal.empty()) return refusal;
      std::vector<std::vector<IDimensionExpr const*>> inputs;
      for (int i = 0; i < num_inputs; ++i) inputs.emplace_back(in[i].d, in[i].d + in[i].nbDims);
      Expressions expressions = {builder};
      for (int output = 0; output < num_outputs; ++output) {
        auto const shape = output_shape(plugin_, output, inputs, expressions);
        out[output].nbDims = static_cast<int32_t>(shape.size());
        for (size_t axis = 0; axis < shape.size(); ++axis) out[output].d[axis] = shape[axis];
      }
      return refusal;
    });
  }

  bool supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* tensors, int32_t num_inputs,
                                 int32_t) noexcept override {
    PluginTensorDesc const& desc = tensors[position].desc;
    return supports(plugin_, position, dtype_of(desc.type), desc.format == nvinfer1::TensorFormat::kLINEAR,
                    num_inputs);
  }

  size_t getWorkspaceSize(DynamicPluginTensorDesc const* in, int32_t num_inputs, DynamicPluginTensorDesc const*,
                          int32_t) const noexcept override {
    uint64_t bytes = 0;
    guarded([&] {
      std::vector<Dims> most;
      for (int i = 0; i < num_inputs; ++i) most.push_back(dims_of(in[i].max));
      bytes = workspace_bytes(plugin_, most);
      return std::string();
    });
    return bytes;
  }

  int32_t onShapeChange(PluginTensorDesc const* in, int32_t num_inputs, PluginTensorDesc const*,
                        int32_t) noexcept override {
    return guarded([&] {
      std::vector<Dims> shapes;
      for (int i = 0; i < num_inputs; ++i) shapes.push_back(dims_of(in[i].dims));
      num_inputs_ = num_inputs;
      return check_shapes(plugin_, fields_, shapes);
    });
  }

  int32_t enqueue(PluginTensorDesc const* in, PluginTensorDesc const* out, void const* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
    return guarded([&] {
      return av::enqueue(plugin_, fields_, bind(in, inputs, num_inputs_), bind(out, outputs, plugin_.num_outputs),
                         reinterpret_cast<uint64_t>(workspace), mailboxes_, stream);
    });
  }

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override {
    std::unique_ptr<AdaptivePlugin> attached;
    int32_t const status = guarded([&] {
      attached = std::make_unique<AdaptivePlugin>(plugin_, fields_);
      return prepare(plugin_, attached->mailboxes_);
    });
    return status == 0 ? attached.release() : nullptr;
  }

  PluginFieldCollection const* getFieldsToSerialize() noexcept override { return serialized_.collection(); }

 private:
  Plugin const& plugin_;
  Fields const fields_;
  FieldValues const serialized_;
  uint64_t mailboxes_ = 0;  // of the context that the plugin is attached to
  int num_inputs_ = 0;  // of the node, from onShapeChange: enqueue is not told whether the last one is there
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit Creator(Plugin const& plugin) : plugin_(plugin) {
    for (int f = 0; f < plugin.num_fields; ++f)
      fields_.emplace_back(plugin.fields[f].name, nullptr,
                           plugin.fields[f].is_float ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32, 1);
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }

  nvinfer1::IPluginV3* createPlugin(char const*, PluginFieldCollection const* collection,
                                    nvinfer1::TensorRTPhase) noexcept override {
    std::unique_ptr<AdaptivePlugin> plugin;
    guarded([&] {
      Fields given, values;
      std::string refusal;
      for (int f = 0; f < collection->nbFields && refusal.empty(); ++f)
        refusal = read_value(collection->fields[f], given[collection->fields[f].name]);
      if (refusal.empty()) refusal = read_fields(plugin_, given, values);
      if (refusal.empty()) plugin = std::make_unique<AdaptivePlugin>(plugin_, values);
      return refusal;
    });
    return plugin.release();
  }

  PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }
  char const* getPluginName() const noexcept override { return plugin_.name; }
  char const* getPluginVersion() const noexcept override { return VERSION; }
  char const* getPluginNamespace() const noexcept override { return NAMESPACE; }

 private:
  Plugin const& plugin_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_;
};

std::vector<nvinfer1::IPluginCreatorInterface*> const& all_creators() {
  static std::vector<std::unique_ptr<Creator>> const owned = [] {
    std::vector<std::unique_ptr<Creator>> made;
    for (Plugin const& plugin : PLUGINS) made.push_back(std::make_unique<Creator>(plugin));
    return made;
  }();
  static std::vector<nvinfer1::IPluginCreatorInterface*> const creators = [] {
    std::vector<nvinfer1::IPluginCreatorInterface*> pointers;
    for (auto const& creator : owned) pointers.push_back(creator.get());
    return pointers;
  }();
  return creators;
}

// A function of TensorRT by name, wherever the process has loaded it; nullptr without TensorRT. `scope` is
// RTLD_DEFAULT, or RTLD_NEXT for what this library stands in front of.
template <class Function>
Function* find_in_tensorrt(char const* name, void* scope) {
  void* entry = dlsym(scope, name);
  if (entry == nullptr) {  // loaded without making its symbols global, as Python packages do
    std::string const file = "libnvinfer.so." + std::to_string(NV_TENSORRT_MAJOR);
    void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library != nullptr) entry = dlsym(library, name);
  }
  return reinterpret_cast<Function*>(entry);
}

}  // namespace
}  // namespace av

#define AV_EXPORT extern "C" __attribute__((visibility("default")))

AV_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  count = static_cast<int32_t>(av::all_creators().size());
  return av::all_creators().data();
}

AV_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { av::logger_finder = finder; }

AV_EXPORT bool initAvPlugins(void* logger, char const* plugin_namespace) {
  if (logger != nullptr) av::given_logger = static_cast<nvinfer1::ILogger*>(logger);
  return av::guarded([&]() -> std::string {
           auto* const find = av::find_in_tensorrt<nvinfer1::IPluginRegistry*()>("getPluginRegistry", RTLD_DEFAULT);
           if (find == nullptr)
             return "TensorRT is not loaded in this process; load libnvinfer before the plugins";
           nvinfer1::IPluginRegistry* const registry = find();
           char const* const space = plugin_namespace == nullptr ? av::NAMESPACE : plugin_namespace;
           for (auto* creator : av::all_creators()) {
             auto* const one = static_cast<av::Creator*>(creator);
             if (registry->getCreator(one->getPluginName(), av::VERSION, space) != nullptr) continue;
             if (!registry->registerCreator(*creator, space))
               return std::string(one->getPluginName()) + " could not be registered";
           }
           return "";
         }) == 0;
}

AV_EXPORT void* av_control_block() { return av::control_block(); }

// Stands in front of TensorRT's own function in a process that preloads this library: plugins are registered
// when the process creates its first runtime, which is before it reads an engine. Processes that never do, such
// as the shell that starts one, load nothing.
AV_EXPORT void* createInferRuntime_INTERNAL(void* logger, int32_t version) noexcept {
  auto* const create =
      av::find_in_tensorrt<void*(void*, int32_t)>("createInferRuntime_INTERNAL", RTLD_NEXT);
  if (create == nullptr) {
    av::report("TensorRT " + std::to_string(NV_TENSORRT_MAJOR) +
               " is not loaded in this process; build the plugins against the version that is");
    return nullptr;
  }
  char const* const wanted = std::getenv("TRTLLM_AV_LOAD_PLUGINS");
  if (wanted != nullptr && wanted[0] == '1') initAvPlugins(logger, nullptr);
  return create(logger, version);
}
