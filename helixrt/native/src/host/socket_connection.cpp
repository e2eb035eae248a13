#include "socket_connection.hpp"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace hx {
void prepare(int fd) {
  int type = 0;
  socklen_t length = sizeof type;
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) || type != SOCK_STREAM)
    throw std::system_error(type ? EPROTOTYPE : errno, std::generic_category());
  if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) || fcntl(fd, F_SETFD, FD_CLOEXEC))
    throw std::system_error(errno, std::generic_category());
}

SocketConnection::SocketConnection(Descriptor fd, int peer, int rail) : Connection(std::move(fd), peer, rail) {
  prepare(this->fd());
  const int yes = 1;
  tcp_ = setsockopt(this->fd(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) == 0;
}

i64 SocketConnection::send(const iovec* pieces, int count) {
  if (error_) return 0;
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces);
  message.msg_iovlen = std::size_t(count);
  const ssize_t n = ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n >= 0) return n;
  if (errno == EAGAIN || errno == EINTR) return 0;
  if (errno != EPIPE && errno != ECONNRESET) return -errno;
  error_ = ECONNRESET;  // what the peer said before it went is still to be read
  return 0;
}

i64 SocketConnection::receive(void* into, std::size_t most) {
  if (!most) return 0;
  const ssize_t n = ::recv(fd(), into, std::min<std::size_t>(most, 1 << 20), MSG_DONTWAIT);
  if (n > 0) return n;
  if (n == 0 || error_) return -ECONNRESET;
  return errno == EAGAIN || errno == EINTR ? 0 : -errno;
}

// Closing a TCP socket that has unread bytes discards what it has not sent yet.
bool SocketConnection::delivered() const {
  int unsent = 0;
  return !tcp_ || error_ || ioctl(fd(), SIOCOUTQ, &unsent) || unsent == 0;
}
}  // namespace hx
