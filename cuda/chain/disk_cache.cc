// SPDX-License-Identifier: Apache-2.0
#include "cuda/chain/disk_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "plugins/core/host/environment.h"
#include "plugins/core/host/hash.h"

namespace stof {
namespace cuda {
namespace {

constexpr size_t kMostBytes = size_t{16} << 20;        // of an entry
constexpr int64_t kMostOfFolder = int64_t{256} << 20;  // of all of them

class File {
 public:
  explicit File(int id) : id_(id) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (id_ >= 0) close(id_);
  }
  int id() const { return id_; }
  bool ok() const { return id_ >= 0; }

 private:
  int id_;
};

struct Header {
  char magic[8];
  uint64_t key_bytes, code_bytes;
  uint64_t hash[2];  // of key and code
};
constexpr char kMagic[8] = {'S', 'T', 'O', 'F', 'C', 'H', 'N', '1'};

Header HeaderOf(const std::string& key, const std::string& code) {
  Header header;
  std::memset(&header, 0, sizeof header);
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.key_bytes = key.size();
  header.code_bytes = code.size();
  for (uint64_t i = 0; i < 2; ++i) {
    header.hash[i] = HashBytes(code.data(), code.size(), HashBytes(key.data(), key.size(), 0x5eed + i));
  }
  return header;
}

std::string NameOf(const std::string& key) {
  char text[40];
  std::snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, HashBytes(key.data(), key.size(), 1),
                HashBytes(key.data(), key.size(), 2));
  return text;
}

// The folder, made where it is missing; -1 where it is not the user's alone.
int OpenFolder(const std::string& path, bool make) {
  if (path.empty() || path[0] != '/') return -1;
  if (make) {
    for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1)) {
      if (mkdir(path.substr(0, at).c_str(), 0700) != 0 && errno != EEXIST) return -1;
    }
    if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return -1;
  }
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat state;
  if (folder >= 0 && (fstat(folder, &state) != 0 || state.st_uid != geteuid() || (state.st_mode & 077) != 0)) {
    close(folder);
    return -1;
  }
  return folder;
}

bool ReadAll(int file, char* to, size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = read(file, to, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}
bool WriteAll(int file, const char* from, size_t bytes) {
  while (bytes > 0) {
    const ssize_t put = write(file, from, bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    from += put;
    bytes -= static_cast<size_t>(put);
  }
  return true;
}

// Of an entry, or of one that is being written; the folder may hold other files of the user's.
bool IsOwnName(const std::string& name) {
  constexpr size_t kDigits = 32;
  const size_t begin = !name.empty() && name[0] == '.' ? 1 : 0;
  const size_t end = name.find_first_not_of("0123456789abcdef", begin);
  if (begin == 0) return name.size() == kDigits && end == std::string::npos;
  return end == begin + kDigits && name[end] == '.';
}

// Makes room for one more entry: of what exceeds the bytes of a folder, the oldest files go first, those among them
// that a process left half written.
void MakeRoom(int folder, int64_t bytes, int64_t most) {
  struct Entry {
    int64_t seconds, bytes;
    std::string name;
  };
  const int id = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const list = id < 0 ? nullptr : fdopendir(id);
  if (list == nullptr) {
    if (id >= 0) close(id);
    return;
  }
  std::vector<Entry> entries;
  while (const dirent* const entry = readdir(list)) {
    struct stat state;
    if (fstatat(folder, entry->d_name, &state, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(state.st_mode) ||
        !IsOwnName(entry->d_name)) {
      continue;
    }
    entries.push_back({state.st_mtime, state.st_size, entry->d_name});
    bytes += state.st_size;
  }
  closedir(list);
  if (bytes <= most) return;
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.seconds < b.seconds; });
  for (const Entry& entry : entries) {
    if (bytes <= most / 2) return;  // with room for more than one
    if (unlinkat(folder, entry.name.c_str(), 0) == 0) bytes -= entry.bytes;
  }
}

}  // namespace

std::string ChainCacheFolder() {
  if (geteuid() != getuid() || getegid() != getgid()) return std::string();  // the environment is somebody else's
  const char* own = ReadVariable(Variable::kChainCache);
  if (own != nullptr) return std::strcmp(own, "off") == 0 ? std::string() : own;
  const char* caches = secure_getenv("XDG_CACHE_HOME");
  if (caches != nullptr && caches[0] == '/') return std::string(caches) + "/stof/chains";
  const char* home = secure_getenv("HOME");
  if (home == nullptr || home[0] != '/') return std::string();
  return std::string(home) + "/.cache/stof/chains";
}

bool LoadCachedChain(const std::string& folder, const std::string& key, std::string* code) {
  const File at(OpenFolder(folder, false));
  if (!at.ok()) return false;
  const File file(openat(at.id(), NameOf(key).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat state;
  if (!file.ok() || fstat(file.id(), &state) != 0 || !S_ISREG(state.st_mode) || state.st_uid != geteuid() ||
      (state.st_mode & 022) != 0) {
    return false;
  }
  Header header;
  const auto bytes = static_cast<size_t>(state.st_size);
  if (state.st_size < 0 || bytes > kMostBytes || bytes < sizeof header ||
      !ReadAll(file.id(), reinterpret_cast<char*>(&header), sizeof header)) {
    return false;
  }
  if (header.key_bytes != key.size() || header.code_bytes == 0 || header.code_bytes > kMostBytes ||
      sizeof header + header.key_bytes + header.code_bytes != bytes) {
    return false;
  }
  std::string kept(key.size(), '\0');
  code->assign(static_cast<size_t>(header.code_bytes), '\0');
  if (!ReadAll(file.id(), &kept[0], kept.size()) || !ReadAll(file.id(), &(*code)[0], code->size())) return false;
  const Header wanted = HeaderOf(key, *code);
  return kept == key && std::memcmp(&header, &wanted, sizeof header) == 0;
}

bool StoreCachedChain(const std::string& folder, const std::string& key, const std::string& code) {
  return StoreCachedChain(folder, key, code, kMostOfFolder);
}

bool StoreCachedChain(const std::string& folder, const std::string& key, const std::string& code, int64_t most) {
  const Header header = HeaderOf(key, code);
  if (code.empty() || sizeof header + key.size() + code.size() > kMostBytes) return false;
  const File at(OpenFolder(folder, true));
  if (!at.ok()) return false;
  MakeRoom(at.id(), static_cast<int64_t>(sizeof header + key.size() + code.size()), most);
  static std::atomic<unsigned> count{0};
  const std::string name = NameOf(key);
  const std::string beside = "." + name + "." + std::to_string(getpid()) + "." + std::to_string(count++);
  bool whole = false;
  {
    const File file(
        openat(at.id(), beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
    if (!file.ok()) return false;
    whole = WriteAll(file.id(), reinterpret_cast<const char*>(&header), sizeof header) &&
            WriteAll(file.id(), key.data(), key.size()) && WriteAll(file.id(), code.data(), code.size());
  }
  if (whole && renameat(at.id(), beside.c_str(), at.id(), name.c_str()) == 0) return true;
  unlinkat(at.id(), beside.c_str(), 0);
  return false;
}

}  // namespace cuda
}  // namespace stof
