// The module llmserve._block_allocator: BlockPool with one call per list of blocks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "llmserve/block_pool.h"

namespace py = pybind11;

namespace {

using llmserve::BlockHash;
using llmserve::BlockPool;

// Block tables are lists of ints; converting item by item avoids a vector per call.
int32_t block_id(const py::list& ids, size_t i) {
  const long id = PyLong_AsLong(PyList_GET_ITEM(ids.ptr(), i));
  if (id == -1 && PyErr_Occurred()) throw py::error_already_set();
  if (id < INT32_MIN || id > INT32_MAX) throw std::out_of_range("a block id has 32 bits");
  return static_cast<int32_t>(id);
}

BlockHash block_hash(PyObject* object) {
  if (!PyBytes_Check(object) || PyBytes_GET_SIZE(object) != llmserve::kBlockHashBytes) {
    throw std::invalid_argument("a block hash is 32 bytes");
  }
  BlockHash hash;
  std::memcpy(hash.data(), PyBytes_AS_STRING(object), hash.size());
  return hash;
}

py::list allocate(BlockPool& pool, int64_t n) {
  if (n < 0 || n > pool.num_free()) throw std::invalid_argument("not enough free blocks");
  std::vector<int32_t> ids(n);
  pool.allocate(n, ids.data());
  py::list result(n);
  for (int64_t i = 0; i < n; ++i) PyList_SET_ITEM(result.ptr(), i, PyLong_FromLong(ids[i]));
  return result;
}

void free_blocks(BlockPool& pool, const py::list& ids) {
  for (size_t i = ids.size(); i-- > 0;) pool.release(block_id(ids, i));
}

void touch(BlockPool& pool, const py::list& ids) {
  for (size_t i = 0; i < ids.size(); ++i) pool.acquire(block_id(ids, i));
}

int64_t count_free(const BlockPool& pool, const py::list& ids) {
  int64_t count = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int32_t id = block_id(ids, i);
    count += id != llmserve::kNullBlock && pool.ref_count(id) == 0;
  }
  return count;
}

void cache(BlockPool& pool, const py::bytes& hash, const py::list& ids) {
  const BlockHash key = block_hash(hash.ptr());
  for (size_t i = 0; i < ids.size(); ++i) {
    pool.insert(key, static_cast<int32_t>(i), block_id(ids, i));
  }
}

py::list lookup(const BlockPool& pool, const py::list& hashes, int32_t group) {
  const size_t size = hashes.size();
  py::list result(size);
  for (size_t i = 0; i < size; ++i) {
    const int32_t id = pool.find(block_hash(PyList_GET_ITEM(hashes.ptr(), i)), group);
    PyList_SET_ITEM(result.ptr(), i, PyLong_FromLong(id));
  }
  return result;
}

std::optional<py::bytes> hash_of(const BlockPool& pool, int32_t id) {
  const BlockHash* hash = pool.hash(id);
  if (hash == nullptr) return std::nullopt;
  return py::bytes(reinterpret_cast<const char*>(hash->data()), hash->size());
}

}  // namespace

PYBIND11_MODULE(_block_allocator, m) {
  m.doc() = "Pool of KV cache blocks; llmserve/kvcache/block_pool.py describes its rules.";
  py::class_<BlockPool>(m, "BlockPool")
      .def(py::init<int32_t>(), py::arg("num_blocks"))
      .def_property_readonly("num_blocks", &BlockPool::num_blocks)
      .def_property_readonly("num_free", &BlockPool::num_free)
      .def_property_readonly("num_cached", &BlockPool::num_cached)
      .def("allocate", &allocate, py::arg("n"))
      .def("free", &free_blocks, py::arg("block_ids"))
      .def("touch", &touch, py::arg("block_ids"))
      .def("count_free", &count_free, py::arg("block_ids"))
      .def("cache", &cache, py::arg("block_hash"), py::arg("block_ids"))
      .def("lookup", &lookup, py::arg("block_hashes"), py::arg("group"))
      .def("reset_cache", &BlockPool::reset_cache)
      .def("ref_count", &BlockPool::ref_count, py::arg("block_id"))
      .def("hash_of", &hash_of, py::arg("block_id"))
      .def("free_order", &BlockPool::free_order)
      .def("check_integrity", &BlockPool::check_integrity);
}
