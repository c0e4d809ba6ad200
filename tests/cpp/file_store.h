// A Store over a directory, for ranks that are processes forked by a test.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "transport/store.h"

class FileStore : public pydist::Store {
 public:
  explicit FileStore(std::string directory) : directory_(std::move(directory)) {}

  // Renamed into place, so that a reader sees all of it or nothing.
  void set(const std::string& key, const std::string& value) override {
    const std::string temporary = path(key) + "." + std::to_string(::getpid());
    std::ofstream(temporary, std::ios::binary) << value;
    std::rename(temporary.c_str(), path(key).c_str());
  }

  std::string get(const std::string& key) override {
    while (!check(key)) ::usleep(200);
    std::ostringstream text;
    text << std::ifstream(path(key), std::ios::binary).rdbuf();
    return text.str();
  }

  int64_t add(const std::string& key, int64_t amount) override {
    const int lock = ::open((path(key) + ".lock").c_str(), O_CREAT | O_RDWR, 0600);
    ::flock(lock, LOCK_EX);
    int64_t value = 0;
    std::ifstream(path(key)) >> value;
    set(key, std::to_string(value += amount));
    ::close(lock);
    return value;
  }

  bool check(const std::string& key) override { return ::access(path(key).c_str(), F_OK) == 0; }

 private:
  std::string path(std::string key) const {
    for (char& letter : key) letter = letter == '/' ? '_' : letter;
    return directory_ + "/" + key;
  }
  std::string directory_;
};
