/* type_meeting.c - Meeting: where ranks that are threads of this process find each other. */
#include "py/py.h"

#include <stddef.h>
#include <structmember.h>
#include <unistd.h>

void zx_py_meeting_lose(zx_py_meeting *m)
{
    m->n_comms--;
    Py_DECREF(m);
}

static void meeting_end(void *object)
{
    zx_py_meeting *self = object;
    if (self->pid == getpid()) zx_meeting_close(self->meeting);
}

static PyObject *meeting_new(PyTypeObject *type, PyObject *args, PyObject *kw)
{
    static char *names[] = {"world", NULL};
    int world;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "i:Meeting", names, &world)) return NULL;
    zx_py_meeting *self = zx_py_new(type, meeting_end);
    if (!self) return NULL;
    self->world = world;
    self->pid = getpid();
    zx_status rc = zx_meeting_open(world, &self->meeting);
    if (rc == ZX_OK) return (PyObject *)self;
    zx_py_raise(self->base.st, rc);
    Py_DECREF(self);
    return NULL;
}

static PyObject *meeting_close(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_meeting *self = (zx_py_meeting *)object;
    if (self->n_comms > 0)
        return ZX_PY_FAIL(self->base.st, ZX_ERR_STATE, "Meeting.close with %lld open Comms: close them first",
                          (long long)self->n_comms);
    if (self->pid == getpid()) zx_meeting_close(self->meeting);
    self->meeting = NULL;
    Py_RETURN_NONE;
}

static int meeting_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static PyMemberDef members[] = {
    {"world", T_INT, offsetof(zx_py_meeting, world), READONLY, "How many ranks meet."},
    {0},
};

static PyMethodDef methods[] = {
    {"close", meeting_close, METH_NOARGS,
     "close($self, /)\n--\n\nFrees it; StateError while a Comm that met here is open."},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Meeting(world)\n--\n\n"
                "Where ranks that are threads of this process meet; one object, given to each rank's Comm."},
    {Py_tp_new, meeting_new},
    {Py_tp_dealloc, zx_py_dealloc},
    {Py_tp_traverse, meeting_traverse},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0},
};

PyType_Spec zx_py_meeting_spec = {
    .name = "zerox._C.Meeting",
    .basicsize = sizeof(zx_py_meeting),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
