#include "driver.h"

#include <dlfcn.h>

#include <mutex>

#include "control_block.h"

namespace av {
namespace {

// Of cuda.h, whose binary interface is stable.
using Status = int;
using Handle = void*;
using DevicePointer = unsigned long long;
constexpr int NUM_PROCESSORS = 16, MAJOR = 75, MINOR = 76;  // CUdevice_attribute
constexpr unsigned PORTABLE = 1, DEVICEMAP = 2;             // CU_MEMHOSTREGISTER_*
constexpr Status ALREADY_REGISTERED = 712;

struct Driver {
  Status (*get_device)(int*);
  Status (*get_attribute)(int*, int, int);
  Status (*load_library)(Handle*, void const*, void*, void*, unsigned, void*, void*, unsigned);
  Status (*get_kernel)(Handle*, Handle, char const*);
  Status (*get_function)(Handle*, Handle);
  Status (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle,
                   void**, void**);
  Status (*allocate)(DevicePointer*, size_t);
  Status (*release)(DevicePointer);
  Status (*clear)(DevicePointer, unsigned char, size_t);
  Status (*synchronize)();
  Status (*lock)(void*, size_t, unsigned);
  Status (*map)(DevicePointer*, void*, unsigned);
  Status (*name)(Status, char const**);
  std::string refusal;
};

Driver open_driver() {
  Driver driver = {};
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    driver.refusal = "no CUDA driver (libcuda.so.1 cannot be opened); install it";
    return driver;
  }
  auto const find = [&](auto& entry, char const* name) {
    entry = reinterpret_cast<std::decay_t<decltype(entry)>>(dlsym(library, name));
    if (entry == nullptr) driver.refusal = std::string("the CUDA driver has no ") + name + "; update it to CUDA 12.0 or newer";
  };
  find(driver.get_device, "cuCtxGetDevice");
  find(driver.get_attribute, "cuDeviceGetAttribute");
  find(driver.load_library, "cuLibraryLoadData");
  find(driver.get_kernel, "cuLibraryGetKernel");
  find(driver.get_function, "cuKernelGetFunction");
  find(driver.launch, "cuLaunchKernel");
  find(driver.allocate, "cuMemAlloc_v2");
  find(driver.release, "cuMemFree_v2");
  find(driver.clear, "cuMemsetD8_v2");
  find(driver.synchronize, "cuCtxSynchronize");
  find(driver.lock, "cuMemHostRegister_v2");
  find(driver.map, "cuMemHostGetDevicePointer_v2");
  find(driver.name, "cuGetErrorName");
  return driver;
}

Driver const& the_driver() {
  static Driver const driver = open_driver();
  return driver;
}

std::string failed(std::string const& what, Status status) {
  char const* name = nullptr;
  the_driver().name(status, &name);
  return what + " failed: " + (name == nullptr ? std::to_string(status) : name);
}

// Kernels of one source on one device, by name.
using Kernels = std::map<std::string, Handle>;
struct Device {
  int processors;
  std::map<std::string, Kernels> sources;
};
std::mutex guard;
std::map<int, Device> devices;
DevicePointer control = 0;

// The newest code that runs on the device: its own major version, at most its own minor one.
Cubin const* find_cubin(std::string const& source, int architecture) {
  Cubin const* best = nullptr;
  for (int i = 0; i < NUM_CUBINS; ++i) {
    Cubin const& cubin = CUBINS[i];
    bool const runs = source == cubin.source && cubin.architecture / 10 == architecture / 10 &&
                      cubin.architecture <= architecture;
    if (runs && (best == nullptr || cubin.architecture > best->architecture)) best = &cubin;
  }
  return best;
}

std::string load(std::string const& source, int architecture, Kernels& kernels) {
  Driver const& driver = the_driver();
  Cubin const* const cubin = find_cubin(source, architecture);
  if (cubin == nullptr)
    return "no " + source + " kernels for compute capability " + std::to_string(architecture / 10) + "." +
           std::to_string(architecture % 10) + " in this library; build it for that architecture";
  Handle library;
  Status status = driver.load_library(&library, cubin->code, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (status != 0)
    return failed("loading the " + source + " kernels", status) +
           "; build the library with an NVRTC that is not newer than the driver";
  for (KernelName const& one : KERNEL_NAMES) {
    if (source != one.source) continue;
    Handle kernel, function;
    status = driver.get_kernel(&kernel, library, one.kernel);
    if (status == 0) status = driver.get_function(&function, kernel);
    if (status != 0) return failed("finding the kernel " + std::string(one.kernel), status);
    kernels[one.kernel] = kernel;
  }
  return "";
}

std::string lock_control_block() {
  Driver const& driver = the_driver();
  void* const block = control_block();
  if (block == nullptr)
    return "TRTLLM_AV_CONTROL_BLOCK names shared memory that does not exist; start the process that creates it "
           "first";
  Status status = driver.lock(block, CONTROL_BLOCK_BYTES, PORTABLE | DEVICEMAP);
  if (status != 0 && status != ALREADY_REGISTERED)
    return failed("locking the control block in memory", status);
  status = driver.map(&control, block, 0);
  return status == 0 ? "" : failed("mapping the control block", status);
}

std::string current_device(int& device) {
  if (!the_driver().refusal.empty()) return the_driver().refusal;
  Status const status = the_driver().get_device(&device);
  return status == 0 ? "" : failed("finding the current device", status);
}

std::string take_mailboxes(uint64_t num_bytes, uint64_t& mailboxes) {
  if (num_bytes == 0) return "";
  DevicePointer address = 0;
  Status status = the_driver().allocate(&address, num_bytes);
  if (status != 0) return failed("allocating " + std::to_string(num_bytes) + " bytes", status);
  status = the_driver().clear(address, 0, num_bytes);
  if (status == 0) status = the_driver().synchronize();  // the engine's stream waits for no other
  if (status != 0) {
    the_driver().release(address);
    return failed("clearing the mailboxes", status);
  }
  mailboxes = address;
  return "";
}

bool reads_control_block(Plugin const& plugin) { return std::string(plugin.name) == "TrimTree"; }

}  // namespace

std::string prepare(Plugin const& plugin, uint64_t& mailboxes) {
  mailboxes = 0;
  int id = 0;
  std::string refusal = current_device(id);
  if (!refusal.empty()) return refusal;
  std::lock_guard<std::mutex> const lock(guard);
  Device& device = devices[id];
  int major = 0, minor = 0;
  the_driver().get_attribute(&device.processors, NUM_PROCESSORS, id);
  the_driver().get_attribute(&major, MAJOR, id);
  the_driver().get_attribute(&minor, MINOR, id);
  std::string const source = source_of(plugin);
  if (device.sources.count(source) == 0) {
    Kernels kernels;
    refusal = load(source, major * 10 + minor, kernels);
    if (!refusal.empty()) return refusal;
    device.sources[source] = kernels;
  }
  if (reads_control_block(plugin) && control == 0) refusal = lock_control_block();
  return refusal.empty() ? take_mailboxes(mailbox_bytes(plugin, device.processors), mailboxes) : refusal;
}

void release(uint64_t mailboxes) {
  if (mailboxes != 0) the_driver().release(mailboxes);
}

std::string enqueue(Plugin const& plugin, Fields const& fields, std::vector<Binding> const& inputs,
                    std::vector<Binding> const& outputs, uint64_t workspace, uint64_t mailboxes, void* stream) {
  int id = 0;
  std::string const refusal = current_device(id);
  if (!refusal.empty()) return refusal;
  std::lock_guard<std::mutex> const lock(guard);
  auto const device = devices.find(id);
  if (device == devices.end() || device->second.sources.count(source_of(plugin)) == 0)
    return std::string(plugin.name) + " was not attached to a context on this device before its first use";
  Driver const& driver = the_driver();
  if (mailboxes == 0 && mailbox_bytes(plugin, device->second.processors) != 0)
    return std::string(plugin.name) + " is used without being attached to a context";
  Invocation const call = {inputs, outputs, {workspace, mailboxes, control}, device->second.processors};
  for (Launch& step : launches(plugin, fields, call)) {
    std::vector<void*> arguments;
    for (auto& argument : step.arguments) arguments.push_back(argument.data());
    Handle const kernel = device->second.sources[step.source][step.kernel];
    Status const status = driver.launch(kernel, step.grid[0], step.grid[1], step.grid[2], step.num_threads, 1,
                                        1, 0, stream, arguments.data(), nullptr);
    if (status != 0) return failed(step.kernel, status);
  }
  return "";
}

}  // namespace av
