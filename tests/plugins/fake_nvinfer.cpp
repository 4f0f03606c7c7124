// What a process sees of TensorRT's library when it creates a runtime: the entry point and a registry that
// writes down what is registered. Built as libnvinfer.so.<major> by tests/plugins/test_csrc_adapter.py.

#include <NvInferRuntime.h>

#include <cstdio>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

struct FakeRegistry final : public IPluginRegistry {
  std::vector<IPluginCreatorInterface*> creators;
  std::string log;

  ~FakeRegistry() noexcept override = default;
  void setErrorRecorder(IErrorRecorder*) noexcept override {}
  IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
  bool isParentSearchEnabled() const override { return false; }
  void setParentSearchEnabled(bool) override {}
  PluginLibraryHandle loadLibrary(char const*) noexcept override { return nullptr; }
  void deregisterLibrary(PluginLibraryHandle) noexcept override {}
  bool registerCreator(IPluginCreatorInterface& creator, char const* space) noexcept override {
    creators.push_back(&creator);
    log += std::string(static_cast<IPluginCreatorV3One&>(creator).getPluginName()) + "@" + space + " ";
    return true;
  }
  IPluginCreatorInterface* const* getAllCreators(int32_t*) const noexcept override { return nullptr; }
  IPluginCreatorInterface* getCreator(char const* name, char const*, char const*) noexcept override {
    for (auto* creator : creators)
      if (static_cast<IPluginCreatorV3One*>(creator)->getPluginName() == std::string(name)) return creator;
    return nullptr;
  }
  bool deregisterCreator(IPluginCreatorInterface const&) noexcept override { return false; }
  IPluginResource* acquirePluginResource(char const*, IPluginResource*) noexcept override { return nullptr; }
  int32_t releasePluginResource(char const*) noexcept override { return 0; }
  IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t*) noexcept override { return nullptr; }
#if NV_TENSORRT_MAJOR < 11
  bool registerCreator(IPluginCreator&, char const*) noexcept override { return false; }
  IPluginCreator* const* getPluginCreatorList(int32_t*) const noexcept override { return nullptr; }
  IPluginCreator* getPluginCreator(char const*, char const*, char const*) noexcept override { return nullptr; }
  bool deregisterCreator(IPluginCreator const&) noexcept override { return false; }
#endif
} registry;

int num_runtimes = 0;

}  // namespace

extern "C" {

void* createInferRuntime_INTERNAL(void*, int32_t) noexcept {
  ++num_runtimes;
  return &num_runtimes;
}

IPluginRegistry* getPluginRegistry() noexcept { return &registry; }

// What has been registered, and how many runtimes were created.
int fake_registered(char* text, int capacity) {
  std::snprintf(text, capacity, "%s", registry.log.c_str());
  return num_runtimes;
}

}  // extern "C"
