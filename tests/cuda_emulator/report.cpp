// Turns code addresses into names and lines, with addr2line. Only findings need it, so it may be slow.
#include <dlfcn.h>
#include <link.h>

#include <cctype>
#include <cstdio>

#include "state.h"

namespace llmserve::cuda::emulated {

namespace {

struct Module {
  uintptr_t base = 0, begin = 0, end = 0;
  std::string path;
};

int find_segments(dl_phdr_info* info, size_t, void* data) {
  Module& module = *static_cast<Module*>(data);
  if (info->dlpi_addr != module.base) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    module.end = max<uintptr_t>(module.end, module.base + segment.p_vaddr + segment.p_memsz);
  }
  return 1;
}

const Module& this_module() {
  static const Module module = [] {
    Module found;
    Dl_info info;
    if (dladdr(reinterpret_cast<const void*>(&find_segments), &info) == 0) return found;
    found.base = found.begin = reinterpret_cast<uintptr_t>(info.dli_fbase);
    found.path = info.dli_fname;
    dl_iterate_phdr(find_segments, &found);
    return found;
  }();
  return module;
}

// Lines of addr2line: function and file:line by turns, from the innermost inlined function outwards.
std::vector<std::string> addr2line(uintptr_t offset) {
  char command[4096];
  std::snprintf(command, sizeof command, "addr2line -f -C -i -e '%s' 0x%zx 2>/dev/null",
                this_module().path.c_str(), static_cast<size_t>(offset));
  std::vector<std::string> lines;
  FILE* const pipe = popen(command, "r");
  if (pipe == nullptr) return lines;
  char line[4096];
  while (std::fgets(line, sizeof line, pipe) != nullptr) {
    lines.emplace_back(line);
    while (!lines.back().empty() && lines.back().back() == '\n') lines.back().pop_back();
  }
  pclose(pipe);
  return lines;
}

// Without the directories and addr2line's remarks.
std::string base_name(std::string place) {
  place = place.substr(0, place.find(' '));
  const size_t slash = place.rfind('/');
  return slash == std::string::npos ? place : place.substr(slash + 1);
}

bool is_plumbing(const std::string& place) {
  for (const char* name : {"device.h:", "emulator.h:", "numbers.h:"}) {
    if (base_name(place).rfind(name, 0) == 0) return true;
  }
  return place.find("/c++/") != std::string::npos;
}

// "void a::b<(anonymous namespace)::C>" becomes "b<C>".
std::string without_scopes(const std::string& name) {
  std::string kept;
  size_t word = 0;  // where the last word begins in `kept`
  for (size_t i = 0; i < name.size(); ++i) {
    if (name.compare(i, 11, "(anonymous ") == 0) {
      i = name.find(')', i);
    } else if (name.compare(i, 2, "::") == 0) {
      kept.resize(word);
      ++i;
    } else {
      kept += name[i];
      const bool is_word = std::isalnum(static_cast<unsigned char>(name[i])) || name[i] == '_';
      if (!is_word) word = kept.size();
    }
  }
  return kept.rfind("void ", 0) == 0 ? kept.substr(5) : kept;
}

}  // namespace

uint32_t module_offset(const void* address) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) - this_module().base);
}

const void* module_address(uint32_t offset) {
  return reinterpret_cast<const void*>(this_module().base + offset);
}

bool is_in_module(uintptr_t address) {
  return address >= this_module().begin && address < this_module().end;
}

std::string source_place(const void* address) {
  // The address is where the call returns to, which can be another line already.
  const std::vector<std::string> lines = addr2line(module_offset(address) - 1);
  for (size_t i = 1; i < lines.size(); i += 2) {
    if (!is_plumbing(lines[i])) return base_name(lines[i]);
  }
  return lines.size() > 1 ? base_name(lines[1]) : "an unknown line";
}

std::string function_name(const void* address) {
  const std::vector<std::string> lines = addr2line(module_offset(address));
  if (lines.empty()) return "a kernel";
  std::string name = lines[0];
  int depth = 0;  // cut at the parameter list, which is outside the template arguments
  for (size_t i = 0; i < name.size(); ++i) {
    if (name.compare(i, 11, "(anonymous ") == 0) i = name.find(')', i);
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0) {
      name.resize(i);
      break;
    }
  }
  return without_scopes(name);
}

std::string index_text(const Index& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

}  // namespace llmserve::cuda::emulated
