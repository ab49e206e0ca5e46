/* module.c - zerox._C: multi-phase initialisation, heap types, and the state that holds them. */
#include "py/py.h"

#include <string.h>

static bool add_type(PyObject *module, PyType_Spec *spec, PyTypeObject *base, PyTypeObject **out)
{
    *out = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, (PyObject *)base);
    return *out && PyModule_AddType(module, *out) == 0;
}

static int module_exec(PyObject *module)
{
    zx_py_state *st = PyModule_GetState(module);
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "zerox._C does not support subinterpreters");
        return -1;
    }
    if (!zx_py_numpy_open() || !zx_py_errors_open(module, st) ||
        PyModule_AddStringConstant(module, "__version__", "0.1.0") < 0 || /* zerox.__version__; a test compares */
        !add_type(module, &zx_py_meeting_spec, NULL, &st->meeting_type) ||
        !add_type(module, &zx_py_comm_spec, NULL, &st->comm_type) ||
        !add_type(module, &zx_py_partitioner_spec, NULL, &st->partitioner_type) ||
        !add_type(module, &zx_py_engine_spec, st->partitioner_type, &st->engine_type) ||
        !add_type(module, &zx_py_tensor_spec, NULL, &st->tensor_type))
        return -1;
    /* NumPy then leaves operators between its arrays and Tensors to Tensor. */
    if (PyDict_SetItemString(st->tensor_type->tp_dict, "__array_ufunc__", Py_None) < 0) return -1;
    PyType_Modified(st->tensor_type);
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    zx_py_state *st = PyModule_GetState(module);
    Py_VISIT(st->error);
    for (int i = 0; i < ZX_N_STATUS; i++)
        Py_VISIT(st->class_of[i]);
    Py_VISIT(st->meeting_type);
    Py_VISIT(st->comm_type);
    Py_VISIT(st->partitioner_type);
    Py_VISIT(st->engine_type);
    Py_VISIT(st->tensor_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    zx_py_state *st = PyModule_GetState(module);
    Py_CLEAR(st->error);
    for (int i = 0; i < ZX_N_STATUS; i++)
        Py_CLEAR(st->class_of[i]);
    Py_CLEAR(st->meeting_type);
    Py_CLEAR(st->comm_type);
    Py_CLEAR(st->partitioner_type);
    Py_CLEAR(st->engine_type);
    Py_CLEAR(st->tensor_type);
    return 0;
}

static void module_free(void *module)
{
    (void)module_clear(module);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030c0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0},
};

PyModuleDef zx_py_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "zerox._C",
    .m_doc = "The compiled core. zerox.Engine, zerox.nn and the rest are thin Python over these types; scripts rarely "
             "need them.",
    .m_size = sizeof(zx_py_state),
    .m_methods = zx_py_functions,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&zx_py_module);
}
