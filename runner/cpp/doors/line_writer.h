// Lines for a descriptor that may be slow or stuck, such as a pipe that nobody reads. Whoever writes never waits for
// it.
#pragma once

#include <memory>
#include <string_view>

namespace mctl {

class LineWriter {
 public:
  explicit LineWriter(int fd);  // which stays the caller's
  ~LineWriter();                // gives what is left a second
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;

  // Puts a line into a queue of bounded size. Those that find it full are dropped; a line `{"dropped":N}` stands where
  // they would.
  void write(std::string_view line);

 private:
  struct State;
  std::shared_ptr<State> state_;  // the thread's too, which may never come back from the descriptor
};

}  // namespace mctl
